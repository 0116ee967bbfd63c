"""The Python API: the captions of the command and of the pyfunc model, for images in every form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import raycap
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from tests.support.bundles import make_bundle, with_confidence, write_images
from tests.support.serving import crown


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_confidence(make_bundle(tmp_path_factory.mktemp("api") / "bundle"))


@pytest.fixture(scope="module")
def captioner(bundle: Path) -> raycap.Captioner:
    return raycap.load(bundle, device="cpu")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_images(tmp_path_factory.mktemp("images"), 5)


def test_paths_bytes_images_and_arrays_give_equal_captions(captioner: raycap.Captioner, names: list[str]) -> None:
    expected = captioner.caption(names)
    images = [Image.open(name) for name in names]
    forms: list[list[Any]] = [
        [Path(name) for name in names],
        [Path(name).read_bytes() for name in names],
        [memoryview(Path(name).read_bytes()) for name in names],
        images,
        [np.asarray(image) for image in images],
        [np.dstack([np.asarray(image), np.full(image.size[::-1], 255, np.uint8)]) for image in images],
    ]
    for form in forms:
        assert captioner.caption(form) == expected
    reverse = captioner.caption(names[::-1])
    assert [each.caption for each in reverse] == [each.caption for each in expected[::-1]], "the order"
    alone = captioner.caption(names, batch_size=1)
    assert [each.caption for each in alone] == [each.caption for each in expected]
    gray = np.asarray(images[0].convert("L"))
    assert captioner.caption([gray]) == captioner.caption([np.dstack([gray] * 3)])


def test_unreadable_images_have_a_reason_and_the_others_captions(
    captioner: raycap.Captioner, names: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(names[0]).read_bytes()[:60])
    bad: list[Any] = [str(tmp_path / "none.png"), broken, b"", b"text", np.zeros((4, 4)), 7]
    found = captioner.caption([names[0], *bad, names[1]], batch_size=3)
    assert [each.caption is None for each in found] == [False, *[True] * len(bad), False]
    assert found[0].to_json() == pytest.approx(captioner.caption(names[:1])[0].to_json(), abs=1e-5)
    said = ("No such file", "cannot be decoded", "empty file", "not an image", "(4, 4) of float64", "of the type int")
    assert all(words in (each.error or "") for each, words in zip(found[1:-1], said, strict=True))
    assert all(each.to_json() == {"error": each.error} for each in found[1:-1])
    assert captioner.caption([]) == []


def test_mistakes_are_one_sentence(captioner: raycap.Captioner, bundle: Path, names: list[str], tmp_path: Path) -> None:
    for call, words in (
        (lambda: captioner.caption(names[0]), "images has the type str"),
        (lambda: captioner.caption(names, batch_size=0), "batch_size is 0"),
        (lambda: captioner.caption(names, beam_size=10**6), "evaluation.beam_size"),
        (lambda: captioner.explain(names[0], head=2), "head is 2"),
        (lambda: raycap.load(tmp_path / "none"), "no such folder"),
        (lambda: raycap.load("champion:a/../b"), "names no configuration"),
        (lambda: raycap.load("champion:demo", storage=tmp_path), "has no champion of demo"),
        (lambda: raycap.load(make_bundle(tmp_path / "features", backbone=False)), "has no backbone"),
    ):
        with pytest.raises(raycap.UserError, match=words) as caught:
            call()  # type: ignore[no-untyped-call]
        assert "\n" not in str(caught.value)


def test_the_champion_is_loaded_and_checked(bundle: Path, names: list[str], tmp_path: Path) -> None:
    record = crown(tmp_path, "demo", make_bundle(tmp_path / "bundle", seed=1), token=1)
    champion = tmp_path / record.bundle
    loaded = raycap.load("champion:demo", storage=tmp_path, device="cpu")
    assert loaded.caption(names) == raycap.load(champion, device="cpu").caption(names)
    assert loaded.model.digest == record.files["model.safetensors"][:16] and loaded.model.bundle == "small"
    (champion / "preprocessing.json").write_text("another")
    with pytest.raises(OSError, match="is missing or has changed"):
        raycap.load("champion:demo", storage=tmp_path)


def test_an_explanation_is_that_of_the_service(captioner: raycap.Captioner, bundle: Path, names: list[str]) -> None:
    service = CaptionService(load_bundle(bundle), device="cpu")
    explanation, of_service = (
        captioner.explain(names[0], caption="a red cat"),
        service.explain(service.pixels(names[0]), "a red cat"),
    )
    assert explanation.words == ("a", "red", "cat") and explanation.grid == (4, 4)
    np.testing.assert_allclose(explanation.attention, of_service.attention, atol=1e-6)
    assert explanation.attribution is not None
    np.testing.assert_allclose(explanation.attribution, of_service.attribution, atol=1e-6)
    np.testing.assert_allclose(np.abs(explanation.attribution.sum(1)), 1, rtol=1e-4)
    quick = captioner.explain(names[0], attribution=False, head=1)
    assert quick.attribution is None and quick.caption == captioner.caption(names[:1])[0].caption
    np.testing.assert_allclose(quick.attention.sum(1), 1, atol=1e-5)


def test_threads_that_share_a_captioner_get_the_results_of_one(captioner: raycap.Captioner, names: list[str]) -> None:
    """Attention is recorded by hooks of the model, which would see the passes of other threads."""
    expected, explained = captioner.caption(names, batch_size=1), captioner.explain(names[0], attribution=False)

    def work(number: int) -> bool:
        if number % 2:
            return captioner.caption(names, batch_size=1) == expected
        return np.array_equal(captioner.explain(names[0], attribution=False).attention, explained.attention)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))
