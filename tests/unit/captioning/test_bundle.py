"""Model bundles: a round trip, a failed save, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycap.models.base import Features
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle
from tests.support.bundles import without_digests
from tests.support.models import (
    small_captioner,
)


@torch.no_grad()
@pytest.mark.parametrize("backbone", [True, False])
def test_a_bundle_gives_back_the_captioner(tmp_path: Path, backbone: bool) -> None:
    ours, vocabulary = small_captioner(backbone)
    folder = tmp_path / "models" / "small"
    inputs = Features(torch.randn(2, 3, 32, 32) if backbone else torch.randn(2, 4, 6))
    tokens = torch.randint(0, len(vocabulary), (4, 5))
    first = ours(inputs, tokens)
    save_bundle(folder, ours, vocabulary, name="small", info={"CIDEr": 1.5, "stages": ("a", "b")})
    for parameter in ours.parameters():
        parameter += 0.1
    assert not torch.equal(ours(inputs, tokens), first)
    bundle = load_bundle(folder)
    assert torch.equal(bundle.captioner(inputs, tokens), first)
    assert bundle.vocabulary.words == vocabulary.words and (bundle.transform is not None) == backbone
    assert bundle.config["info"] == {"CIDEr": 1.5, "stages": ["a", "b"]}
    save_bundle(folder, ours, vocabulary, name="small", info={})
    assert not torch.equal(load_bundle(folder).captioner(inputs, tokens), first)
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    if not backbone:
        with pytest.raises(ValueError, match="has no backbone"):
            bundle.captioner.features(Features(torch.zeros(1, 3, 32, 32)))


def test_a_failed_save_leaves_the_old_bundle(tmp_path: Path) -> None:
    ours, vocabulary = small_captioner(False)
    folder = tmp_path / "bundle"
    save_bundle(folder, ours, vocabulary, name="small", info={})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_bundle(folder, ours, vocabulary, name="small", info={"bad": object()})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_bundles_that_are_none_are_refused(tmp_path: Path) -> None:
    ours, vocabulary = small_captioner(False)
    folder = tmp_path / "bundle"
    with pytest.raises(ValueError, match=r"lacks config.yaml, model.safetensors, vocabulary.json"):
        load_bundle(folder)
    save_bundle(folder, ours, vocabulary, name="small", info={})
    text = (without_digests(folder) / "config.yaml").read_text()
    for change, words in (
        (("format: 2", "format: 3"), "format 3; this version of raycap reads format 2 only"),
        (("d_model: 8", "d_modle: 8"), "config.yaml: unknown key model.d_modle: did you mean d_model"),
        (("d_model: 8", "d_model: 16"), "this configuration needs"),
        (("vocabulary_size: 7", "vocabulary_size: 8"), "has 7 words, config.yaml says 8"),
    ):
        assert change[0] in text
        (folder / "config.yaml").write_text(text.replace(*change))
        with pytest.raises(ValueError, match=words):
            load_bundle(folder)
