"""The report in a headless Chromium: from disk, by mouse and by keyboard, wide and narrow, without errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raycap.pipeline.data.synthetic.scenes import draw_scene, make_scene
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, ReportStage, report_html
from tests.support.chromium import NAMES, Page, chromium_page, find_chromium

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no Chromium on the PATH (looked for {', '.join(NAMES)})")

SHOWN = "[...document.querySelectorAll('.card:not([hidden])')].map(c => c.dataset.id)"
COUNT = "document.querySelector('[data-count]').textContent"
WHERE = "document.querySelector('.where').textContent"
OPEN = "document.querySelector('dialog').open"
NUM_IMAGES = 40


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    """One browser and one page file for all tests; each test loads it anew."""
    folder = tmp_path_factory.mktemp("report")
    images = []
    for index in range(NUM_IMAGES):
        scene, captions = make_scene(0, index)
        picture = folder / f"{index}.png"
        draw_scene(scene, 64).save(picture)
        # Scores 0.00, 0.05, ... in an order that is not that of the ids.
        score = (index * 7 % NUM_IMAGES) / 20
        split = "novel" if index % 4 == 3 else "test"
        others = {"xe_frozen": "a zebra"}
        images.append(ReportImage(index, picture, captions[0], captions[1:], score, split, others))
    odd = "<img src=x onerror=\"console.error('escaped')\"> zyzzyva hot-zyzzyva (zyzzyva"
    images.append(ReportImage("odd", b"", odd, [odd], None, "test"))
    curve = [(step, 5 / (1 + step)) for step in range(0, 100, 10)]
    stages = [ReportStage(name, {"loss": curve, "val CIDEr-D": curve}) for name in ("xe_frozen", "scst_frozen")]
    page = Report(
        "A run", "demo", "protocol", ["BLEU-4"] * 7, [("test", ["12.3"] * 7)], stages, images, {"commit": "abc"}
    )
    (folder / "report.html").write_text(report_html(page), encoding="utf-8")
    assert PROGRAM is not None
    with chromium_page(PROGRAM, folder / "profile") as tab:
        yield tab, folder / "report.html"


@pytest.fixture
def page(browser: tuple[Page, Path]) -> Iterator[Page]:
    tab, path = browser
    tab.problems.clear()
    tab.requests.clear()
    tab.window(1280, 900)
    tab.open(path)
    yield tab
    tab.evaluate("new Promise(done => setTimeout(done, 50))")  # late errors arrive before this answer
    assert tab.problems == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]


def _by_score(split: str | None = None, best: bool = False) -> list[str]:
    ids = [i for i in range(NUM_IMAGES) if split is None or ("novel" if i % 4 == 3 else "test") == split]
    return [str(i) for i in sorted(ids, key=lambda i: i * 7 % NUM_IMAGES, reverse=best)]


def _choose(page: Page, name: str, value: str) -> None:
    page.evaluate(
        f"(() => {{ const e = document.querySelector('[name={name}]'); e.value = '{value}'; "
        "e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_sorting_and_splits(page: Page) -> None:
    assert page.evaluate(COUNT) == "41 pictures"
    assert page.evaluate(SHOWN) == _by_score()[:24]
    page.click("[data-more]")
    assert page.evaluate(SHOWN) == [*_by_score(), "odd"]  # a picture without a score comes last in both orders
    _choose(page, "order", "best")
    assert page.evaluate(SHOWN) == _by_score(best=True)[:24]
    _choose(page, "split", "novel")
    assert page.evaluate(SHOWN) == _by_score("novel", best=True)
    page.click("[name=shuffle]")
    assert page.evaluate("document.querySelector('[name=order]').value") == "random"
    assert sorted(page.evaluate(SHOWN)) == sorted(_by_score("novel"))


@pytest.mark.proof
def test_dialog_by_keyboard(page: Page) -> None:
    order = _by_score()
    page.evaluate("document.querySelector('.card .picture').focus()")
    page.press("Enter", 13, "\r")
    assert page.evaluate(OPEN) and page.evaluate(WHERE) == "Picture 1 of 41"
    text = "document.querySelector('dialog .headline span').textContent"
    page.press("ArrowRight", 39)
    assert page.evaluate(WHERE) == "Picture 2 of 41" and page.evaluate(text).endswith(f" {order[1]}")
    page.press("ArrowLeft", 37)
    page.press("ArrowLeft", 37)
    assert page.evaluate(WHERE) == "Picture 41 of 41"  # round the corner, to one behind "show more"
    assert page.evaluate("document.querySelector('dialog .lost') !== null")
    page.press("ArrowLeft", 37)
    decoded = (
        "(async () => { const i = document.querySelector('dialog img'); await i.decode(); return i.naturalWidth; })()"
    )
    assert page.evaluate(decoded) == 64
    assert page.evaluate("document.querySelectorAll('dialog .references li').length") == 4
    page.press("Escape", 27)
    assert not page.evaluate(OPEN)
    page.evaluate("new Promise(done => setTimeout(done, 50))")  # the dialog's "close" is an event of its own
    assert page.evaluate("document.activeElement.parentElement.dataset.id") == order[-1]  # focus is where one was
