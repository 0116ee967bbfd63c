"""The page of `raycap serve` in a headless Chromium: captions of every model, heat maps, by mouse and by keyboard."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

import raycap
from tests.support.bundles import make_bundle, with_confidence
from tests.support.chromium import NAMES, Page, chromium_page, find_chromium
from tests.support.ray_cluster import free_port
from tests.support.serving import LocalCaptioners, host_of, local_client

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no Chromium on the PATH (looked for {', '.join(NAMES)})")
TOKEN = "a-token-of-many-letters"
WORDS = """[...document.querySelectorAll('article')].map(
  article => [...article.querySelectorAll('.caption button')].map(button => button.textContent))"""
PRESSED = "[...document.querySelectorAll('.caption button[aria-pressed=true]')].map(b => b.textContent)"
EXPLAINED = """document.querySelectorAll('article').length === 2 && [...document.querySelectorAll('article')].every(
  article => article.querySelector('.caption button[aria-pressed]'))"""
# whether anything is drawn over the image
HEAT = """(() => { const heat = document.querySelector('#heat'), copy = document.createElement('canvas');
  copy.width = heat.width; copy.height = heat.height;
  const context = copy.getContext('2d');
  context.drawImage(heat, 0, 0);
  return context.getImageData(0, 0, copy.width, copy.height).data.some(value => value); })()"""


class Opened(NamedTuple):
    page: Page
    url: str
    bundles: list[Path]


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The address of a server in a thread."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("page")
    bundles = [with_confidence(make_bundle(folder / "a")), make_bundle(folder / "b", seed=1)]
    models = {
        name: LocalCaptioners(host_of(bundle)) for name, bundle in zip(("main", "<b>other"), bundles, strict=True)
    }
    assert PROGRAM is not None
    with running(local_client(models).app) as url, chromium_page(PROGRAM, folder / "profile") as page:
        page.window(1200, 900)
        yield Opened(page, url, bundles)


def wait(page: Page, expression: str) -> Any:
    """The value of an expression once it is true."""
    deadline = time.monotonic() + 60
    while not (value := page.evaluate(expression)):
        assert time.monotonic() < deadline, expression
        time.sleep(0.05)
    return value


def test_every_model_captions_a_sample_and_words_show_heat_maps(opened: Opened) -> None:
    page = opened.page
    page.visit(opened.url)
    page.problems.clear()
    wait(page, "document.querySelectorAll('article').length === 2")
    assert page.evaluate("document.querySelectorAll('h2')[1].textContent") == "<b>other", "escaped"
    page.click("#samples button")
    wait(page, EXPLAINED)
    data = page.evaluate("""(async () => {
        const bytes = new Uint8Array(await state.blob.arrayBuffer()); return [...bytes]; })()""")
    captioners = [raycap.load(bundle, device="cpu") for bundle in opened.bundles]
    expected = [captioner.caption([bytes(data)], num_results=3)[0] for captioner in captioners]
    assert page.evaluate(WORDS) == [list(each.tokens) for each in expected]
    assert "confidence" in page.evaluate("document.querySelectorAll('article')[0].textContent")
    assert page.evaluate("document.querySelectorAll('article')[0].querySelectorAll('li').length") == 3
    assert not page.evaluate(HEAT) and page.evaluate(PRESSED) == []
    page.click(".caption button")
    assert page.evaluate(PRESSED) == [expected[0].tokens[0]] and page.evaluate(HEAT)
    page.press("Escape", 27)
    assert page.evaluate(PRESSED) == []
    assert not page.problems, page.problems
    assert all(url.startswith((opened.url, "blob:")) for url in page.requests), "nothing from elsewhere"


@pytest.mark.proof
def test_an_error_is_shown_and_a_script_from_elsewhere_is_not_run(opened: Opened) -> None:
    page = opened.page
    page.visit(opened.url)
    wait(page, "document.querySelectorAll('article').length === 2")
    page.evaluate("use(new Blob(['no image'], {type: 'image/png'}))")
    wait(page, "document.querySelectorAll('article .bad').length === 2")
    assert "not an image in a known format" in page.evaluate("document.querySelector('article .bad').textContent")
    page.evaluate("""(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';
        document.body.append(s); })()""")
    assert page.evaluate("window.ran") is None, "the policy allows only the page's own script"
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()


@pytest.mark.proof
def test_the_page_asks_for_the_token(opened: Opened) -> None:
    page = opened.page
    models = {"main": LocalCaptioners(host_of(opened.bundles[0]))}
    with running(local_client(models, TOKEN).app) as url:
        page.visit(url)
        wait(page, "!document.querySelector('#access').hidden")
        page.evaluate("document.querySelector('#token').focus()")
        page.type(TOKEN)
        page.press("Enter", 13, "\r")
        wait(page, "document.querySelectorAll('article').length === 1")
        assert page.evaluate("document.querySelector('#access').hidden") and TOKEN not in page.evaluate("location.href")
    page.problems.clear()
