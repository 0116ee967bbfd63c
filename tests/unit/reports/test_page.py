"""The report page: its content, the escaping of untrusted text, and that no partial page is ever written."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raycap.pipeline.evaluation.confidence import measure_quality
from raycap.pipeline.evaluation.reports import page as report
from raycap.pipeline.evaluation.reports.page import (
    Report,
    ReportImage,
    ReportStage,
    choose_images,
    curve,
    report_html,
)

VOID = {"meta", "link", "br", "img", "input", "path"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'single' {{ 7 * 7 }} SCRIPT_DIGEST"


class Reader(HTMLParser):
    """Elements with their attributes and text; fails on tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str, name: str | None = None) -> list[dict[str, str | None]]:
        matches = [attributes for element, attributes in self.elements if element == tag]
        return [one for one in matches if name is None or name in (one.get("class") or "").split()]


def _picture(width: int = 60, height: int = 40, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def _image(number: int, score: float | None = 0.5, **changes: object) -> ReportImage:
    given = {"caption": f"caption {number}", "references": [f"reference {number}"], "split": "test", **changes}
    return ReportImage(image_id=number, path=_picture(), score=score, **given)  # type: ignore[arg-type]


def _report(**changes: object) -> Report:
    given: dict[str, object] = {
        "title": "A run",
        "run_id": "demo-1234",
        "protocol": "Karpathy test, beam 5",
        "score_columns": ["BLEU-4", "CIDEr-D"],
        "score_rows": [("test", ["12.3", "45.6"]), ("Paper\nnot comparable: other data", ["41.5", "140.4"])],
        "stages": [ReportStage("xe_frozen", {"loss": [(1, 5.0), (2, 4.0)]}, {"steps": "2"})],
        "images": [_image(1, 0.2), _image(2, 1.4)],
        "metadata": {"commit": "abc"},
        **changes,
    }
    return Report(**given)  # type: ignore[arg-type]


def _written(folder: Path, page: Report) -> tuple[str, Reader]:
    (folder / "report.html").write_text(report_html(page), encoding="utf-8")
    html = (folder / "report.html").read_text("utf-8")
    return html, Reader(html)


def test_page_holds_scores_curves_pictures_and_metadata(tmp_path: Path) -> None:
    html, reader = _written(tmp_path, _report())
    text = " ".join(" ".join(reader.text).split())
    for expected in ("A run", "demo-1234", "Karpathy test, beam 5", "45.6", "140.4", "not comparable: other data"):
        assert expected in text
    for expected in ("xe_frozen", "caption 2", "reference 2", "CIDEr-D 1.40", "abc"):
        assert expected in text
    assert html.startswith("<!DOCTYPE html>")
    assert [card["data-id"] for card in reader.all("li", "card")] == ["1", "2"]


def test_the_page_shows_the_risk_and_the_reliability_of_each_split(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    confidences = generator.random(400)
    good = generator.random(400) < confidences
    html, reader = _written(tmp_path, _report(confidence={"novel": measure_quality(confidences, good, EVIL)}))
    text = " ".join(" ".join(reader.text).split())
    assert f"mean{confidences.mean():.3f}" in "".join(text.split())
    assert "Confidence" in text and "novel" in text and "not good, by coverage" in text and "AUROC" in text
    assert "100 %" in text and "10 bins of equal size" in text and len(reader.all("script")) == 1
    plots = [attributes for attributes in reader.all("div", "plot") if "coverage" in (attributes["aria-label"] or "")]
    points = json.loads(plots[0]["data-points"] or "")
    assert len(points) == 20 and points[-1][2] == "coverage 100%"
    assert points[-1][3] == f"{1 - good.mean():.1%}" and html.count("#confidence") == 1
    assert all(0 <= x <= 100 and 0 <= y <= 100 for x, y, *_ in points)
    assert "#confidence" not in _written(tmp_path, _report())[0]


def test_other_peoples_text_stays_text(tmp_path: Path) -> None:
    stage = ReportStage(EVIL, {EVIL: [(1, 1.0), (2, 2.0)], EVIL + " cider": [(1, 1.0)]}, {EVIL: EVIL})
    page = _report(
        title=EVIL,
        run_id=EVIL,
        protocol=EVIL,
        score_columns=[EVIL],
        score_rows=[(f"{EVIL}\n{EVIL}", [EVIL]), (EVIL, [f"unavailable: {EVIL}"])],
        stages=[stage, stage],
        images=[_image(1, caption=EVIL, references=[EVIL], split=EVIL, alternatives={EVIL: EVIL}), _image(2)],
        metadata={EVIL: EVIL},
    )
    html, reader = _written(tmp_path, page)
    assert len(reader.all("script")) == 1
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert {image["src"][:5] for image in reader.all("img") if image["src"]} == {"data:"}
    assert html.count("{{ 7 * 7 }}") > 10 and "49 SCRIPT_DIGEST" not in html
    assert EVIL in (reader.all("img")[0]["alt"] or "")


def test_policy_allows_exactly_the_pages_own_script(tmp_path: Path) -> None:
    html, reader = _written(tmp_path, _report(title=EVIL))
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(meta["content"] for meta in reader.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("path", "reason"), [(b"", "empty file"), (b"not a picture", "not an image"), (Path("nowhere.png"), "No such file")]
)
def test_unreadable_picture_gets_a_placeholder(tmp_path: Path, path: Path | bytes, reason: str) -> None:
    lost = ReportImage(7, path, "a caption", ["a reference"], 0.3, "test")
    _, reader = _written(tmp_path, _report(images=[lost, _image(1)]))
    assert len(reader.all("li", "card")) == 2 and len(reader.all("img")) == 1
    assert any("could not be shown" in text and reason in text for text in reader.text)


def test_large_gallery_holds_worst_best_and_random_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [index / 100 for index in range(300)]
    random.Random(0).shuffle(scores)
    images = [_image(index, score) for index, score in enumerate(scores)]
    chosen, counts = choose_images(images, 30, seed="a")
    assert counts == {"worst": 10, "best": 10, "random": 10} and len(chosen) == 30
    scores_shown = sorted(image.score for image in chosen if image.score is not None)
    assert scores_shown[:10] == pytest.approx([index / 100 for index in range(10)])
    assert scores_shown[-10:] == pytest.approx([index / 100 for index in range(290, 300)])
    assert len({image.image_id for image in chosen}) == 30
    assert choose_images(images, 30, seed="a")[0] == chosen
    assert choose_images(images, 30, seed="b")[0] != chosen

    monkeypatch.setattr(report, "MAX_IMAGES", 30)
    _, reader = _written(tmp_path, _report(images=images))
    text = " ".join(reader.text)
    assert "This page holds 30 of 300 pictures: 10 with the lowest CIDEr-D, 10 with the highest" in text
    assert len(reader.all("li", "card")) == 30


def test_unavailable_scores_are_explained_and_never_zero(tmp_path: Path) -> None:
    rows = [("test", ["unavailable: java not found", "1.0"]), ("novel", ["unavailable: java not found", "unavailable"])]
    _, reader = _written(tmp_path, _report(score_rows=rows))
    text = "".join(reader.text)
    assert text.count("unavailable: java not found") == 1 and "unavailable: no reason given" in text
    assert len(reader.all("td", "none")) == 3


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12)), min_size=1, max_size=500, unique_by=lambda p: p[0]
    )
)
def test_curves_lie_in_their_box_and_read_back(series: list[tuple[int, float]]) -> None:
    plot = curve("loss", series)
    assert plot is not None and len(plot.points) == min(len(series), 240) and len(plot.y_ticks) < 10
    positions = [*(place[:2] for place in plot.points), *((x, 0.0) for x, _ in plot.x_ticks)]
    assert all(-0.01 <= x <= 100.01 and -0.01 <= y <= 100.01 for x, y in positions)
    assert plot.readings[0][0] == f"step {min(series)[0]:,}" and plot.readings[-1][0] == f"step {max(series)[0]:,}"
    heights = [y for _, y, _, _ in plot.points]
    if len(series) <= 240:
        values = [value for _, value in sorted(series)]
        assert heights[values.index(max(values))] == min(heights)


def test_captions_have_their_language_and_the_direction_of_their_script(tmp_path: Path) -> None:
    images = [_image(1, caption="一个< t"), _image(2, caption="دائرة حمراء كبيرة")]
    _, page = _written(tmp_path, _report(images=images, language="zh"))
    captions = [attributes for attributes in page.all("p") if "data-caption" in attributes]
    assert [(each["lang"], each["dir"]) for each in captions] == [("zh", "auto")] * 2
