"""Joined models: the weighted sum of weights, what stays bit for bit, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raycap.models.config import PLAIN, Decoding, ExpansionNetConfig
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, StoredBundle, load_bundle
from raycap.pipeline.evaluation.captioning.soup import Soup, have_one_backbone, mixed, mixed_tensors, save_soup
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.storage.path import storage_path
from tests.support.bundles import make_bundle, without_digests
from tests.support.confidence import make_confidence
from tests.support.models import (
    one_thread,  # noqa: F401
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three bundles of one architecture; only their random weights differ."""
    folder = tmp_path_factory.mktemp("bundles")
    return [make_bundle(folder / name, seed) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def members(folders: list[Path]) -> list[Bundle]:
    return [load_bundle(folder) for folder in folders]


def weights_of(bundle: Bundle) -> dict[str, torch.Tensor]:
    return bundle.captioner.state_dict()


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("alone", range(3))
def test_a_member_with_the_weight_1_remains_bit_for_bit(members: list[Bundle], alone: int) -> None:
    weights = [float(number == alone) for number in range(3)]
    assert_equal(weights_of(mixed(members, weights)), weights_of(members[alone]))


def test_equal_members_remain_bit_for_bit(members: list[Bundle]) -> None:
    """0.3 x + 0.7 x is not always x."""
    assert_equal(weights_of(mixed([members[0], members[0]], [0.3, 0.7])), weights_of(members[0]))


def test_members_are_not_changed(folders: list[Path], members: list[Bundle]) -> None:
    mixed(members, [0.2, 0.3, 0.5])
    assert_equal(weights_of(members[0]), weights_of(load_bundle(folders[0])))


def test_the_order_of_two_members_does_not_matter(members: list[Bundle]) -> None:
    a, b, _ = members
    assert_equal(weights_of(mixed([a, b], [0.3, 0.7])), weights_of(mixed([b, a], [0.7, 0.3])))
    assert not torch.equal(*(weights_of(mixed([a, b], w))["model.lm_head.weight"] for w in ([0.3, 0.7], [0.7, 0.3])))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any), st.integers(0, 10**6))
def test_the_sum_is_numpys(shares: list[int], seed: int) -> None:
    weights = [share / sum(shares) for share in shares]
    generator = np.random.default_rng(seed)
    arrays = [generator.normal(size=(3, 5)).astype(np.float32) for _ in weights]
    states = [{"x": torch.from_numpy(array), "steps": torch.tensor(7)} for array in arrays]
    found = mixed_tensors(states, weights)
    expected = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True))
    np.testing.assert_allclose(found["x"].numpy(), expected, rtol=0, atol=1e-6)
    assert found["x"].dtype == torch.float32 and found["steps"] == 7


def test_half_precision_is_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(100, generator=generator).bfloat16() for _ in range(2)]
    found = mixed_tensors([{"x": tensor} for tensor in tensors], [0.3, 0.7])["x"]
    expected = 0.3 * tensors[0].float() + 0.7 * tensors[1].float()
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


def test_whole_numbers_that_differ_are_refused() -> None:
    states = [{"index": torch.tensor([number])} for number in (1, 2)]
    with pytest.raises(UserError, match="the tensor index has whole numbers that differ"):
        mixed_tensors(states, [1.0, 0.0])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0], "the weights 1 are 1, and there are 2 bundles"),
        ([0.5, 0.6], "the weights 0.5, 0.6 must be at least 0 and have the sum 1"),
        ([1.5, -0.5], "at least 0"),
        ([float("nan"), 1.0], "at least 0"),
        ([float("inf"), 0.0], "the sum 1"),
    ],
)
def test_other_weights_are_refused(members: list[Bundle], weights: list[float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mixed(members[:2], weights)


def with_words(bundle: Bundle) -> Bundle:
    words = [word.replace("mat", "rug") for word in bundle.vocabulary.words]
    return replace(bundle, vocabulary=Vocabulary(tuple(words), bundle.vocabulary.tokenizer))


def with_tokenizer(bundle: Bundle) -> Bundle:
    return replace(bundle, vocabulary=Vocabulary(bundle.vocabulary.words, "spacy"))


def with_language(bundle: Bundle) -> Bundle:
    protocol = {"language": "de", "tokenizer": "unicode"}
    return replace(bundle, config=bundle.config | {"protocol": protocol})


def with_transform(bundle: Bundle) -> Bundle:
    assert bundle.transform is not None
    return replace(bundle, transform=replace(bundle.transform, mean=(0.1, 0.1, 0.1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_words, "a and b cannot be joined: the vocabularies differ; give models of one recipe"),
        (with_tokenizer, "the tokenizer is expansionnet and spacy"),
        (with_language, "these models cannot be taken together: captions in en and captions in de"),
        (with_transform, "the image transforms differ"),
    ],
)
def test_bundles_of_other_words_or_images_are_refused(
    members: list[Bundle], change: Callable[[Bundle], Bundle], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        mixed([members[0], change(members[1])], [0.5, 0.5], ["a", "b"])


def test_other_architectures_are_refused(
    tmp_path: Path, members: list[Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = load_bundle(make_bundle(tmp_path / "features", backbone=False))
    with pytest.raises(UserError, match="one has a backbone and the other has none"):
        mixed([members[0], features], [0.5, 0.5])
    other = load_bundle(make_bundle(tmp_path / "wide", backbone=False, width=24))
    with pytest.raises(UserError, match="sizes.feature_width is 16 and 24"):
        mixed([features, other], [0.5, 0.5])
    settings: Any = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    changed = ExpansionNetConfig(**settings, static_expansion=(4, 9))
    monkeypatch.setattr(other.captioner.model, "config", changed)
    with pytest.raises(UserError, match=r"model.static_expansion is \(4, 8\) and \(4, 9\)"):
        mixed([features, other], [0.5, 0.5])


def test_the_protocol_is_what_the_members_share(members: list[Bundle]) -> None:
    def recorded(bundle: Bundle, **protocol: Any) -> Bundle:
        return replace(bundle, config=bundle.config | {"protocol": protocol})

    one = recorded(members[0], objective="scst", beam_size=5)
    two = recorded(members[1], objective="scst", beam_size=3)
    protocol = mixed([one, two], [0.5, 0.5]).config["protocol"]
    assert protocol["objective"] == "scst" and protocol["beam_size"] is None


def test_a_bundle_of_an_older_version_is_joined_with_a_newer_one(members: list[Bundle]) -> None:
    """The older one records no rules of decoding, and the sum has none."""
    newer = replace(members[0], config=members[0].config | {"protocol": asdict(Protocol(decoding=Decoding()))})
    older = replace(members[1], config=members[1].config | {"protocol": {}})
    assert mixed([newer, older], [0.5, 0.5]).config["protocol"]["decoding"] == asdict(PLAIN)
    assert mixed([newer, newer], [0.5, 0.5]).config["protocol"]["decoding"] == asdict(Decoding())


def test_the_confidences_of_the_members_are_not_those_of_their_soup(members: list[Bundle]) -> None:
    judging = [replace(member, confidences=(make_confidence("a"),)) for member in members[:2]]
    assert mixed(judging, [0.5, 0.5]).confidences == ()
    assert judging[0].confidences == (make_confidence("a"),)


def test_a_written_soup_is_a_bundle_that_names_its_sources(tmp_path: Path, members: list[Bundle]) -> None:
    soup = mixed(members[:2], [0.25, 0.75])
    save_soup(tmp_path / "soup", soup, [("models/a", 0.25, "11"), ("models/b", 0.75, "22")])
    loaded = load_bundle(tmp_path / "soup")
    assert_equal(weights_of(loaded), weights_of(soup))
    assert loaded.vocabulary == members[0].vocabulary and loaded.transform == members[0].transform
    assert loaded.config["info"] == {
        "source 1": "models/a", "weight 1": 0.25, "sha256 1": "11",
        "source 2": "models/b", "weight 2": 0.75, "sha256 2": "22",
    }  # fmt: skip
    assert "| weight 2 | 0.75 |" in (tmp_path / "soup" / "card.md").read_text()


def test_a_source_joins_what_it_loads(folders: list[Path], members: list[Bundle]) -> None:
    sources = [StoredBundle(storage_path(folder)) for folder in folders[:2]]
    expected = weights_of(mixed(members[:2], [0.5, 0.5]))
    assert_equal(weights_of(Soup(sources, [0.5, 0.5]).load()), expected)
    alone = Soup(sources, [0.5, 0.5], without_backbone=True).load()
    assert alone.captioner.backbone is None and alone.transform is None
    assert_equal(
        weights_of(alone), {name: tensor for name, tensor in expected.items() if not name.startswith("backbone.")}
    )


def test_equal_backbones_are_recognized(tmp_path: Path, members: list[Bundle]) -> None:
    a, b, _ = members
    assert have_one_backbone([a, a]) and not have_one_backbone([a, b])
    features = load_bundle(make_bundle(tmp_path / "features", backbone=False))
    assert not have_one_backbone([features, features])


def test_a_hostile_member_is_refused_in_one_sentence(tmp_path: Path) -> None:
    hostile = without_digests(make_bundle(tmp_path / "hostile"))
    config = yaml.safe_load((hostile / "config.yaml").read_text())
    config["protocol"] = {"language": "<script>"}
    (hostile / "config.yaml").write_text(yaml.safe_dump(config))
    ours = make_bundle(tmp_path / "ours", protocol=Protocol())
    sources = [StoredBundle(storage_path(folder)) for folder in (ours, hostile)]
    with pytest.raises(UserError, match="protocol.language") as error:
        Soup(sources, [0.5, 0.5]).load()
    assert "\n" not in str(error.value)
