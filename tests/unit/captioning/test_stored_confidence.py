"""A confidence in a bundle: how it is added, what belongs to it, and when an evaluation fits one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import fetched, load_bundle, read_confidences, store_results
from raycap.pipeline.evaluation.confidence import Quality
from raycap.pipeline.evaluation.evaluate import Options, evaluate, keep_results
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.captioning import captions_of, images_of
from tests.support.confidence import make_confidence


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
