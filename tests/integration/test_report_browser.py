"""The report in a headless Chromium: from disk, by mouse and by keyboard, wide and narrow, without errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raycap.pipeline.data.synthetic.scenes import draw_scene, make_scene
from raycap.pipeline.evaluation.reports.page import LayerColors, Report, ReportImage, ReportStage, write_report
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
        words = len(captions[0].split())
        # The first picture has maps: the attention of word k is to cell k, its attribution to cell 15 - k.
        maps = np.full((words, 16), 0.05) + 0.5 * np.eye(words, 16) if index == 0 else None
        shares = None if maps is None else maps[:, ::-1]
        phrases = "".join(str(number // 3) for number in range(words))
        layer = LayerColors("layer 1: 2 patch clusters, 2 phrases", 4, "1000010000100001", phrases)
        layers = [] if maps is None else [layer]
        others = {"xe_frozen": "a zebra"}
        images.append(
            ReportImage(index, picture, captions[0], captions[1:], score, split, others, maps, shares, layers)
        )
    odd = "<img src=x onerror=\"console.error('escaped')\"> zyzzyva hot-zyzzyva (zyzzyva"
    images.append(ReportImage("odd", b"", odd, [odd], None, "test"))
    curve = [(step, 5 / (1 + step)) for step in range(0, 100, 10)]
    stages = [ReportStage(name, {"loss": curve, "val CIDEr-D": curve}) for name in ("xe_frozen", "scst_frozen")]
    page = Report(
        "A run", "demo", "protocol", ["BLEU-4"] * 7, [("test", ["12.3"] * 7)], stages, images, {"commit": "abc"}
    )
    write_report(folder / "report.html", page)
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


@pytest.mark.proof
def test_a_word_shows_where_the_model_looked(page: Page) -> None:
    brightest = (
        "(() => { const veil = document.querySelector('.veil'), d = veil.getContext('2d')"
        ".getImageData(0, 0, veil.width, veil.height).data; let best = 0;"
        "for (let i = 0; i < d.length / 4; i++) if (d[4 * i] > d[4 * best]) best = i; return best; })()"
    )
    hidden = "document.querySelector('.veil').hidden"
    words = "[...document.querySelectorAll('dialog .word')]"
    page.click(".picture")  # the worst picture, which has maps
    caption = page.evaluate("document.querySelector('.card .caption').textContent")
    assert page.evaluate(f"{words}.map(w => w.textContent).join(' ')") == caption and page.evaluate(hidden)
    page.evaluate(f"{words}[2].focus()")
    assert not page.evaluate(hidden) and page.evaluate(brightest) == 2
    fits = (
        "(() => { const a = document.querySelector('.veil').getBoundingClientRect(), "
        "b = document.querySelector('.big img').getBoundingClientRect(); "
        "return [a.left - b.left, a.top - b.top, b.right - a.right, b.bottom - a.bottom, a.width / a.height]; })()"
    )
    left, top, right, bottom, shape = page.evaluate(fits)
    assert abs(left - right) < 1 and abs(top - bottom) < 1 and min(left, top) > -1 and abs(shape - 1) < 0.01
    page.evaluate(f"{words}[2].blur()")
    assert page.evaluate(hidden)
    page.evaluate(f"{words}[3].click()")  # chosen: it stays
    page.evaluate(f"{words}[5].focus()")
    page.evaluate(f"{words}[5].blur()")
    assert page.evaluate(brightest) == 3 and page.evaluate(f"{words}[3].getAttribute('aria-pressed')") == "true"
    kinds = "[...document.querySelectorAll('.kinds button')]"
    assert page.evaluate(f"{kinds}.map(k => k.getAttribute('aria-pressed')).join()") == "true,false"
    page.evaluate(f"{kinds}[1].click()")
    assert page.evaluate(brightest) == 12, "the chosen word's attribution"
    page.evaluate(f"{kinds}[0].click()")
    assert page.evaluate(brightest) == 3
    page.evaluate(f"{words}[5].focus()")
    page.press("ArrowRight", 39)  # the next picture has none
    assert page.evaluate(f"{words}.length") == 0 and page.evaluate("document.querySelector('.veil')") is None
