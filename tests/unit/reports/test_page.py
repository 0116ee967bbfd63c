"""The report page: its content, the escaping of untrusted text, and that no partial page is ever written."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import random
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raycap.pipeline.evaluation.confidence.confidence import measure_quality
from raycap.pipeline.evaluation.reports import charts
from raycap.pipeline.evaluation.reports import page as report
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, ReportStage, Table, choose_images, write_report
from raycap.pipeline.evaluation.reports.pictures import LayerColors, drawable

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
    write_report(folder / "report.html", page)
    html = (folder / "report.html").read_text("utf-8")
    return html, Reader(html)


def test_page_holds_scores_curves_pictures_and_metadata(tmp_path: Path) -> None:
    html, reader = _written(tmp_path, _report())
    text = " ".join(" ".join(reader.text).split())
    for expected in ("A run", "demo-1234", "Karpathy test, beam 5", "45.6", "140.4", "not comparable: other data"):
        assert expected in text
    for expected in ("xe_frozen", "caption 2", "reference 2", "CIDEr-D 1.40", "abc", "2 pictures, mean 0.800"):
        assert expected in text
    assert html.startswith("<!DOCTYPE html>")
    assert [card["data-id"] for card in reader.all("li", "card")] == ["1", "2"]


def test_further_tables_follow_the_scores(tmp_path: Path) -> None:
    tables = [Table("Cost", "Of this machine.", ["parameters", EVIL], [("ours", ["12", EVIL]), (EVIL, ["13", ""])])]
    _, reader = _written(tmp_path, _report(tables=tables, gallery_note=EVIL))
    assert [section["id"] for section in reader.all("section")][:2] == ["scores", "table-1"]
    assert {"href": "#table-1"} in reader.all("a") and len(reader.all("script")) == 1
    text = " ".join(" ".join(reader.text).split())
    assert "Cost Of this machine. Model parameters" in text and text.count(EVIL) == 4
    assert "Of this machine" not in _written(tmp_path, _report())[0]


def test_pictures_that_were_chosen_by_contrast_are_sorted_by_it(tmp_path: Path) -> None:
    images = [_image(1, 0.2, contrast=0.1, alternatives={"b": "x"}), _image(2, 1.4, contrast=0.7)]
    html, reader = _written(tmp_path, _report(images=images))
    assert [option["value"] for option in reader.all("option")].count("different") == 1
    assert re.search(r'<select name="order">\s*<option value="different">most different CIDEr-D first', html)
    assert [card["data-difference"] for card in reader.all("li", "card")] == ["0.1", "0.7"]
    assert not reader.all("figure", "histogram"), "they are no sample of the scores"
    assert reader.all("figure", "histogram") != _written(tmp_path, _report())[1].all("figure", "histogram")


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
    assert points[-1][3].startswith(f"{1 - good.mean():.1%} (") and html.count("#confidence") == 1
    assert all(0 <= x <= 100 and 0 <= y <= 100 for x, y, *_ in points)
    assert "#confidence" not in _written(tmp_path, _report())[0]


def test_page_loads_no_external_resource(tmp_path: Path) -> None:
    html, reader = _written(tmp_path, _report())
    for _, attributes in reader.elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#"))
    assert not re.search(r"https?://|@import|url\(", html)


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


def test_thumbnails_are_small_jpegs_of_the_same_shape(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(_picture(900, 600))
    images = [
        ReportImage(1, tmp_path / "photo.png", "a", ["b"], 0.1, "test"),
        ReportImage(2, _picture(64, 64), "a", ["b"], 0.2, "test"),
    ]
    _, reader = _written(tmp_path, _report(images=images))
    sizes = []
    for element in reader.all("img"):
        data = base64.b64decode((element["src"] or "").removeprefix("data:image/jpeg;base64,"))
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.format == "JPEG"
            assert picture.convert("RGB").getpixel((5, 5)) == pytest.approx((200, 30, 30), abs=4)
            sizes.append(picture.size)
        assert sizes[-1] == (int(element["width"] or 0), int(element["height"] or 0))
    assert sizes == [(256, 171), (64, 64)]


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
    assert "300 pictures, mean 1.495" in text  # the distribution is that of all


def test_pictures_without_scores_are_only_drawn_at_random() -> None:
    images = [_image(index, None if index % 2 else float(index)) for index in range(10)]
    chosen, counts = choose_images(images, 6, seed="a")
    assert counts == {"worst": 2, "best": 2, "random": 2}
    assert {image.image_id for image in chosen} >= {0, 2, 6, 8}
    chosen, counts = choose_images([_image(index, None) for index in range(10)], 6, seed="a")
    assert counts == {"worst": 0, "best": 0, "random": 6} and len(chosen) == 6


def test_unavailable_scores_are_explained_and_never_zero(tmp_path: Path) -> None:
    rows = [("test", ["unavailable: java not found", "1.0"]), ("novel", ["unavailable: java not found", "unavailable"])]
    _, reader = _written(tmp_path, _report(score_rows=rows))
    text = "".join(reader.text)
    assert text.count("unavailable: java not found") == 1 and "unavailable: no reason given" in text
    assert len(reader.all("td", "none")) == 3


def test_empty_parts_are_left_out(tmp_path: Path) -> None:
    page = _report(score_columns=[], score_rows=[], stages=[], images=[], metadata={})
    _, reader = _written(tmp_path, page)
    assert reader.all("section") == [] and reader.all("li") == []
    _, reader = _written(tmp_path, _report(images=[_image(1, None)], stages=[ReportStage("xe", {"loss": []})]))
    assert [section["id"] for section in reader.all("section")] == ["scores", "training", "gallery", "about"]
    assert any("recorded no values" in text for text in reader.text) and "not scored" in reader.text


def test_row_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'test' has 1 cells, but there are 2 columns \(BLEU-4, CIDEr-D\)"):
        write_report(tmp_path / "report.html", _report(score_rows=[("test", ["1"])]))
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old page")

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_report(path, _report())
    assert path.read_text() == "the old page" and list(tmp_path.iterdir()) == [path]


def test_page_is_the_same_for_the_same_report(tmp_path: Path) -> None:
    write_report(tmp_path / "a.html", _report())
    write_report(tmp_path / "deeper" / "b.html", _report())
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "deeper" / "b.html").read_bytes()


def test_overview_is_drawn_where_several_stages_validate(tmp_path: Path) -> None:
    stages = [
        ReportStage("xe", {"val CIDEr-D": [(10, 0.2), (20, 0.5)]}),
        ReportStage("scst", {"val CIDEr-D": [(30, 0.6)]}),
    ]
    _, reader = _written(tmp_path, _report(stages=stages))
    assert len(reader.all("figure", "wide")) == 1 and len(reader.all("span", "band")) == 2
    _, reader = _written(tmp_path, _report(stages=stages[:1]))
    assert reader.all("figure", "wide") == []


# The geometry of the charts.


def test_curve_lies_in_its_box_and_reads_back() -> None:
    series = [(step, 5.0 / (1 + step)) for step in range(20)]
    plot = charts.make_plot("loss", [("", series)])
    assert plot is not None
    assert [(point[2], point[3]) for point in plot.points][:2] == [("step 0", "5"), ("step 1", "2.5")]
    assert [point[0] for point in plot.points] == pytest.approx([100 * step / 19 for step in range(20)], abs=0.01)
    heights = [point[1] for point in plot.points]
    assert heights == sorted(heights) and 0 < heights[0] < heights[-1] < 100
    # The scale starts at zero here, so heights are in proportion to values.
    assert (100 - heights[1]) / (100 - heights[0]) == pytest.approx(0.5, abs=0.001)
    assert all(0 <= position <= 100 for position, _ in plot.x_ticks + plot.y_ticks) and len(plot.y_ticks) >= 3


def test_values_that_are_not_finite_are_counted_not_drawn() -> None:
    plot = charts.make_plot("loss", [("", [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)])])
    assert plot is not None and len(plot.points) == 2 and plot.note == "2 of 4 values not finite"
    assert charts.make_plot("loss", [("", [(0, math.nan)])]) is None
    assert all(math.isfinite(y) for _, y in plot.lines[0])


@pytest.mark.parametrize("series", [[(5, 1.0)], [(5, 0.0), (9, 0.0)], [(0, -3.0), (1, -3.0)], [(0, 1e-12), (1, 1e12)]])
def test_odd_curves_have_a_scale(series: list[tuple[int, float]]) -> None:
    plot = charts.make_plot("x", [("", series)])
    assert plot is not None and plot.y_ticks and plot.lines[0] and len(plot.y_ticks) < 10
    assert all(0 <= y <= 100 for _, y, _, _ in plot.points)


def test_log_scale_only_where_values_span_orders_of_magnitude() -> None:
    wide = charts.make_plot("grad_norm", [("", [(0, 1000.0), (1, 10.0), (2, 0.1)])])
    assert wide is not None and wide.note == "log scale"
    heights = [point[1] for point in wide.points]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.02)
    narrow = charts.make_plot("loss", [("", [(0, 9.0), (1, 1.0)])])
    assert narrow is not None and narrow.note == ""


def test_noise_is_smoothed_and_a_schedule_is_not() -> None:
    rng = random.Random(0)
    noisy = [(step, 2 + rng.gauss(0, 0.3)) for step in range(400)]
    plot = charts.make_plot("loss", [("", noisy)])
    assert plot is not None and plot.raw_lines and plot.note == "line: mean of 25 values"
    assert len(plot.points) <= charts.MAX_POINTS
    steps = charts.make_plot("lr", [("", [(step, 2e-4 * 0.8 ** (step // 50)) for step in range(400)])])
    assert steps is not None and steps.raw_lines == [] and steps.note == ""


def test_running_mean_and_thinning_keep_what_matters() -> None:
    series = [(step, float(step)) for step in range(11)]
    assert charts.running_mean(series, 3)[5] == (5, 5.0) and charts.running_mean(series, 3)[0] == (0, 0.5)
    assert charts.running_mean(series, 1) == series
    spiky = [(step, 100.0 if step == 777 else 1.0) for step in range(2000)]
    thinned = charts.thin(spiky, 50)
    assert len(thinned) <= 50 and (777, 100.0) in thinned and thinned[0][0] == 0 and thinned[-1][0] == 1999


def test_overview_gives_stages_equal_width_in_order() -> None:
    plot = charts.make_plot("cider", [("a", [(0, 0.1), (1000, 0.5)]), ("b", [(1010, 0.6), (1020, 0.7)])])
    assert plot is not None and [band[:2] for band in plot.bands] == [(0, 50), (50, 50)]
    across = [point[0] for point in plot.points]
    assert across == sorted(across) and across[1] < 50 < across[2]
    assert len(plot.lines) == 2  # no line from stage to stage


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00002, "2e-5"),
        (0.0015, "0.0015"),
        (1.23456, "1.235"),
        (12345.6, "12,346"),
        (2e7, "2e7"),
        (-3, "-3"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert charts.format_number(value) == text


def test_histogram_counts_every_score_once() -> None:
    scores = [0.0, 0.1, 0.3, 0.30000000000000004, 1.0, 2.0]
    chart = charts.make_histogram("test", scores, 2.0)
    assert sum(chart.counts) == 6 and chart.median == "0.300"
    for count, low, high in zip(chart.counts, chart.edges, [*chart.edges[1:-1], math.inf], strict=False):
        assert count == sum(low - 1e-9 <= score < high - 1e-9 for score in scores)
    assert len(charts.make_histogram("test", [0.01, 10.0], 10.0).counts) <= 24
    assert sum(charts.make_histogram("test", [0.0], 0.01).counts) == 1


def test_template_is_packaged() -> None:
    assert report.TEMPLATE.is_file() and report.TEMPLATE.suffix == ".jinja"


def test_attributions_and_clusters_reach_the_page(tmp_path: Path) -> None:
    maps = np.arange(8.0).reshape(2, 4)
    layers = [
        LayerColors("layer 1: 3 patch clusters, 1 phrase", np.array([[0, 11], [11, 2]]), np.array([3, 3])),
        LayerColors("layer 2: 2 phrases", None, np.array([1, 0])),
    ]
    shown = ReportImage(1, _picture(), "a cat", [], 0.5, "test", {}, maps, -maps, layers)
    write_report(tmp_path / "r.html", Report("t", "r", "p", [], [], [], [shown], {}))
    page = (tmp_path / "r.html").read_text()
    assert page.count("data-attribution=") == page.count("data-attention=") == 1
    match = re.search(r'data-clusters="([^"]*)"', page)
    assert match
    assert json.loads(unescape(match.group(1))) == [
        {"title": "layer 1: 3 patch clusters, 1 phrase", "rows": 2, "cells": "0bb2", "words": "33"},
        {"title": "layer 2: 2 phrases", "rows": 0, "cells": "", "words": "10"},
    ]
    plain = ReportImage(1, _picture(), "a cat", [], 0.5, "test")
    write_report(tmp_path / "r.html", Report("t", "r", "p", [], [], [], [plain], {}))
    assert "data-clusters=" not in (tmp_path / "r.html").read_text()


def test_captions_of_other_scripts_have_their_language_and_tokens(tmp_path: Path) -> None:
    """Maps are shown for tokens that are no words, and each text has the direction of its script."""
    maps = np.arange(12.0).reshape(3, 4)
    parts = ["一", "个<", " t"]
    images = [
        _image(1, caption="一个< t", parts=parts, attention=maps),
        _image(2, caption="دائرة حمراء كبيرة", attention=maps),
    ]
    _, page = _written(tmp_path, _report(images=images, language="zh"))
    captions = [attributes for attributes in page.all("p") if "data-caption" in attributes]
    assert {(each["lang"], each["dir"]) for each in captions} == {("zh", "auto")}
    assert sorted(str(each.get("data-parts")) for each in captions) == sorted(
        [json.dumps(parts).replace("<", "\\u003c"), "None"]
    )
    cards = [attributes for attributes in page.all("li") if attributes.get("class") == "card"]
    assert all(card.get("data-attention") for card in cards) and len(cards) == 2
    assert all(each["dir"] == "auto" for each in page.all("li") if "data-reference" in each)


def test_words_without_a_font_are_numbered() -> None:
    words, font = drawable(["ein", "grüner", "Stern"], 18)
    assert words == ["ein", "grüner", "Stern"] and font.getbbox("ü") != font.getbbox("\uffff")
    assert drawable(["a\U00017000", "b"], 18)[0] == ["word 1", "word 2"]  # none of the fonts has Tangut
