"""The signals of captions, the confidence that follows from them, and when an evaluation fits one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.models.base import Features
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import fetched, load_bundle, read_confidences, store_results
from raycap.pipeline.evaluation.captioning.constraints import ImageConstraints, build_automata
from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_images
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.confidence import SIGNALS, Linear, Quality
from raycap.pipeline.evaluation.evaluate import Options, evaluate, keep_results
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import WORDS, make_bundle, with_confidence
from tests.support.captioning import captions_of, images_of
from tests.support.confidence import make_confidence
from tests.support.few_images import FewImages, caption_split, half


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small", backbone=False)


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "bundle"))


def test_a_stored_confidence_belongs_to_the_bundle_and_replaces_that_of_its_search(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("of the user")
    for search, bias in (("a", 0.0), ("b", 0.0), ("a", 1.0)):
        store_results(storage_path(bundle), make_confidence(search, bias))
    assert [(fit.search, fit.log_odds.bias) for fit in load_bundle(bundle).confidences] == [("b", 0.0), ("a", 1.0)]
    assert (bundle / "notes.txt").read_text() == "of the user"
    assert "confidence.json" in json.loads((bundle / "digests.json").read_text())["files"]
    content = (bundle / "confidence.json").read_bytes()
    (bundle / "confidence.json").write_bytes(content.replace(b"100", b"101"))
    with pytest.raises(UserError, match="confidence.json does not have the digest"):
        load_bundle(bundle)
    (bundle / "confidence.json").unlink()
    with pytest.raises(UserError, match=r"lacks confidence.json, which is in its digests.json"):
        load_bundle(bundle)


def test_links_in_a_strangers_bundle_are_not_followed(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (bundle / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"bundle/link.* is a link or a special file"):
        store_results(storage_path(bundle), make_confidence())
    assert (bundle / "link").is_symlink() and not (bundle / "confidence.json").exists()


def test_a_bundle_on_s3_gets_its_confidence_there(
    bundle: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    place = storage_path(f"s3://data/{tmp_path.name}/bundle")
    Mirror(place, bundle).push()
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    store_results(place, make_confidence("a"))
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "other"))
    assert load_bundle(fetched(place)).confidences == (make_confidence("a"),)


def split(name: str, num_good: int, count: int = 60) -> tuple[str, Dataset, dict[int, ImageCaption]]:
    """A split with captions. Good ones equal their reference, and have the higher log-probabilities."""
    words = [f"a cat sits on mat number {image} of {image}" for image in range(count)]
    texts = {image: words[image] if image < num_good else "two dogs" for image in range(count)}
    means = {image: -0.5 if image < num_good else -1.9 for image in texts}
    signals = {image: (mean, -3.0, 5.0, -1.0, 0.0, 0.0, 0.0, -0.5, -8.0) for image, mean in means.items()}
    return name, images_of({image: [text] for image, text in enumerate(words)}, name), captions_of(texts, signals)


def qualities(config: RunConfig, bundles: Sequence[Path], *splits: tuple[str, Any, Any]) -> dict[str, Quality]:
    """Evaluates, which stores a fitted confidence. Returns the quality of the confidence by split."""
    images, captions = {name: part for name, part, _ in splits}, {name: each for name, _, each in splits}
    scores = evaluate([*map(storage_path, bundles)], images, config, None, Options(captions=captions))
    if len(bundles) == 1:
        keep_results(scores, {}, Decorations())
    return {each.split: each.quality for each in scores.splits if each.quality is not None}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Without Java."""
    default = "raycap.pipeline.evaluation.evaluate.metrics_of_split"
    monkeypatch.setattr(default, lambda *_, **__: ("CIDEr-D",))
    values = small_config(tmp_path / "results", features={"store": "never"})
    values["data"] |= {"synthetic": None, "root": str(tmp_path)}
    return parse_config(values)


def test_an_evaluation_fits_on_validation_and_judges_the_other_splits(
    bundle: Path, config: RunConfig, log_lines: list[str]
) -> None:
    val, test = split("val", 30), split("test", 20)
    assert qualities(config, [bundle], test) == {}
    assert log_lines[-1] == "confidence   none was fitted with this search; evaluate the validation split to fit it"
    quality = qualities(config, [bundle], test, val)
    assert quality.keys() == {"test"} and quality["test"].risks[-1].risk == pytest.approx(2 / 3)
    (fit,) = read_confidences(bundle)
    assert fit.good_ciderd == 0.85 and fit.num_images == 60
    assert qualities(config, [bundle], test) == quality, "the stored one"
    modified = (bundle / "confidence.json").stat().st_mtime_ns
    qualities(config, [bundle], val)
    assert (bundle / "confidence.json").stat().st_mtime_ns == modified, "the same fit is not written again"
    search = config.evaluation.model_copy(update={"beam_size": 3})
    config = config.model_copy(update={"evaluation": search})
    assert qualities(config, [bundle], test) == {}
    assert qualities(config, [bundle], test, val).keys() == {"test"} and len(read_confidences(bundle)) == 2
    assert qualities(config, [bundle, bundle], test, val) == {}, "an ensemble"
    assert qualities(config, [bundle], split("val", 60)) == {} and len(read_confidences(bundle)) == 2


WHOLE = LocalContext()


@torch.no_grad()
def test_signals_depend_on_image_and_model_only(tmp_path: Path) -> None:
    """Batches, workers and further captions do not matter. Ensembles, constrained searches and training have none."""
    captioner = load_bundle(make_bundle(tmp_path / "bundle", backbone=False)).captioner
    images = FewImages(torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(3)))

    def signals(context: LocalContext = WHOLE, **keys: Any) -> dict[int, tuple[float, ...]]:
        settings = EvaluationSection(**({"beam_size": 3, "max_length": 9, "batch_size": 3} | keys))
        search = CaptionSearch(settings, WORDS)
        found, _ = caption_split([captioner], [images], search, context)
        assert all(not each.signals for ranked in found.values() for each in ranked[1:])
        return {image: ranked[0].signals for image, ranked in found.items()}

    whole = signals()
    assert len(whole) == 7 and all(len(each) == len(SIGNALS) for each in whole.values())
    assert len({each[-1] for each in whole.values()}) > 1, "the energies differ"
    for others in (
        signals(batch_size=7),
        signals(batch_size=1),
        signals(half(0)) | signals(half(1)),
        signals(num_results=3),
    ):
        assert others.keys() == whole.keys()
        for image, each in whole.items():
            assert others[image] == pytest.approx(each, abs=1e-4)
    settings = EvaluationSection(beam_size=3, max_length=9, batch_size=3)
    found, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), WHOLE)
    for row, ranked in enumerate(found.values()):
        memory = captioner.encode(Features(images.features[row : row + 1]))
        caption = [token for token in ranked[0].ids if token != WORDS.pad]
        logits = captioner.model.decode(memory, torch.tensor([caption[:-1]]))[0]
        assert len(caption) > 6, "the first tokens are not all tokens"
        assert ranked[0].signals[-1] == pytest.approx(-float(logits.logsumexp(-1)[:4].mean()), abs=1e-4)
    both, _ = caption_split([captioner] * 2, [images] * 2, CaptionSearch(settings, WORDS), WHOLE)
    assert all(ranked[0].signals == () for ranked in both.values())
    automata = build_automata({2: ImageConstraints((("mat",),))}, WORDS, "c")
    constrained, _ = caption_split([captioner], [images], CaptionSearch(settings, WORDS), WHOLE, automata)
    assert all(ranked[0].signals == () for ranked in constrained.values())
    best = caption_images(captioner, images, WORDS, settings, WHOLE)
    assert [each.caption for each in best.values()] == [ranked[0].caption for ranked in found.values()]
    assert all(each.signals == () for each in best.values())


def test_a_served_model_judges_by_the_signals_of_an_evaluation(tmp_path: Path) -> None:
    """The number of captions and the other images of the batch do not matter."""
    bundle = load_bundle(with_confidence(make_bundle(tmp_path / "bundle")))
    service, (fit,) = CaptionService(bundle), bundle.confidences
    bundle.confidences = (replace(fit, log_odds=Linear((*[0.0] * (len(SIGNALS) - 1), -0.3), -2.0)),)
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    search = CaptionSearch(service.search.model_copy(update={"batch_size": 2}), bundle.vocabulary)
    evaluated, _ = caption_split([bundle.captioner], [FewImages(pixels)], search, WHOLE)
    judged = [(each.confidence, each.expected_ciderd) for each in service.caption(pixels)]
    expected = [bundle.confidences[0].judge(ranked[0].signals) for ranked in evaluated.values()]
    more = service.changed_search({}, num_results=2)
    alone = [(each.confidence, each.expected_ciderd) for image in pixels for each in service.caption(image[None], more)]
    assert len({confidence for confidence, _ in judged}) == 5, "by the energy alone, which differs"
    for first, second, third in zip(judged, expected, alone, strict=True):
        assert second is not None and None not in (*first, *third)
        assert first == pytest.approx(second, abs=1e-4) and first == pytest.approx(third, abs=1e-4)
