"""ExpansionNet v2 against tensors recorded from the reference implementation (copied from the shared golden files)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features
from raycap.models.config import BackboneConfig
from raycap.models.convert.tensor_files import read_tensors
from raycap.models.convert.upstream import upstream_names
from raycap.models.decoding.search import Captions, beam_search
from raycap.models.encoders.backbone import Backbone, load_tensors
from raycap.pipeline.evaluation.captioning.upstream import read_expansionnet_vocabulary
from raycap.pipeline.training.objectives import smoothed_cross_entropy
from tests.support.golden import EXPANSIONNET as GOLDEN
from tests.support.golden import SWIN_SETTINGS
from tests.support.golden import import_expansionnet as imported


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    arrays = np.load(GOLDEN / "expected.npz")
    values = json.loads((GOLDEN / "expected.json").read_text())
    return values | {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CaptionModel:
    return imported("checkpoint.pth", tmp_path_factory.mktemp("first") / "bundle").captioner.model


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> CaptionModel:
    return imported("checkpoint_second.pth", tmp_path_factory.mktemp("second") / "bundle").captioner.model


def real_lengths(recorded: dict[str, Any]) -> Tensor:
    return recorded["features"].shape[1] - recorded["feature_padding"]


@torch.no_grad()
@pytest.mark.parametrize("padded", [True, False])
def test_encoder_and_logits(model: CaptionModel, recorded: dict[str, Any], padded: bool) -> None:
    suffix = "" if padded else "_unpadded"
    memory = model.encode(Features(recorded["features"], real_lengths(recorded) if padded else None))
    close(memory.states, recorded[f"encoder_output{suffix}"])
    logits = model.decode(memory, recorded["tokens"][:, :-1])
    real = recorded["tokens"][:, 1:] != recorded["pad"]
    if padded:
        assert not real.all() and real_lengths(recorded).min() < memory.states.shape[1]
    close(logits[real], recorded[f"logits{suffix}"][real])


@torch.no_grad()
def test_a_model_that_forgets_the_padding_is_noticed(model: CaptionModel, recorded: dict[str, Any]) -> None:
    memory = model.encode(Features(recorded["features"]))
    assert (memory.states - recorded["encoder_output"]).abs().max() > 1e-2


@torch.no_grad()
def test_bfloat16_logits(model: CaptionModel, recorded: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(Features(recorded["features"], real_lengths(recorded)), recorded["tokens"][:, :-1])
    assert logits.dtype == torch.bfloat16
    expected = recorded["logits"]
    error = (logits.float() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error[recorded["tokens"][:, 1:] != recorded["pad"]].max() < 3e-2


def loss(model: CaptionModel, recorded: dict[str, Any]) -> Tensor:
    tokens = recorded["tokens"]
    logits = model(Features(recorded["features"], real_lengths(recorded)), tokens[:, :-1])
    is_target = tokens[:, 1:] != recorded["pad"]
    return smoothed_cross_entropy(logits[is_target], tokens[:, 1:][is_target], 0.1) / is_target.sum()


def test_label_smoothed_loss_and_gradient_norms(model: CaptionModel, recorded: dict[str, Any]) -> None:
    model.zero_grad()
    value = loss(model, recorded)
    close(value.detach(), recorded["label_smoothing_loss"])
    value.backward()
    parameters = dict(model.named_parameters())
    norms = {}
    for own, theirs in upstream_names(model.config).items():
        gradient = parameters[own].grad
        assert gradient is not None, own
        for name, part in zip(theirs, gradient.chunk(len(theirs)), strict=True):
            norms[name] = float(part.norm())
    assert norms.keys() == recorded["gradient_norms"].keys()
    for name, expected in recorded["gradient_norms"].items():
        assert norms[name] == pytest.approx(expected, rel=1e-4, abs=1e-7), name


def same_beams(found: Captions, expected: dict[str, Any]) -> None:
    for image, (sequences, log_probs) in enumerate(zip(expected["sequences"], expected["log_probs"], strict=True)):
        assert found.tokens.shape[1] == len(sequences)
        for beam, (tokens, values) in enumerate(zip(sequences, log_probs, strict=True)):
            length = int(found.lengths[image, beam])
            assert found.tokens[image, beam, :length].tolist() == tokens
            close(found.log_probs[image, beam, :length], torch.tensor(values), 1e-4)
            assert float(found.scores[image, beam]) == pytest.approx(sum(values) / length, abs=1e-4)


@pytest.mark.parametrize("beams", [2, 3, 5])
def test_every_beam(model: CaptionModel, recorded: dict[str, Any], beams: int) -> None:
    memory = model.encode(Features(recorded["features"]))
    length = recorded["config"]["beam_len"]
    found = beam_search(model, memory, beam_size=beams, max_length=length, num_results=beams)
    same_beams(found, recorded["beam_search"][str(beams)])


def test_the_ensemble_averages_probabilities(
    model: CaptionModel, second: CaptionModel, recorded: dict[str, Any]
) -> None:
    models = (model, second)
    memories = [one.encode(Features(recorded["features"])) for one in models]
    found = beam_search(models, memories, beam_size=3, max_length=recorded["config"]["beam_len"], num_results=3)
    same_beams(found, recorded["ensemble_beam_3"])


@torch.no_grad()
def test_end_to_end(tmp_path: Path, recorded: dict[str, Any]) -> None:
    arrays = {name: torch.from_numpy(value) for name, value in np.load(GOLDEN / "end_to_end_expected.npz").items()}
    expected = json.loads((GOLDEN / "end_to_end_expected.json").read_text())
    captioner = imported("end_to_end_checkpoint.pth", tmp_path / "bundle", SWIN_SETTINGS).captioner
    assert captioner.backbone is not None and captioner.backbone.config.image_size == 48
    images = Features(arrays["images"])
    close(captioner.features(images).tokens, arrays["swin_features"])
    memory = captioner.encode(images)
    close(memory.states, arrays["encoder_output"])
    real = arrays["tokens"][:, 1:] != recorded["pad"]
    logits = captioner(images, arrays["tokens"][:, :-1])
    close(logits[real], arrays["logits"][real])
    found = beam_search(captioner.model, memory, beam_size=5, max_length=recorded["config"]["beam_len"])
    lengths = found.lengths[:, 0].tolist()
    assert [[found.tokens[i, 0, :n].tolist()] for i, n in enumerate(lengths)] == expected["beam_5"]


@torch.no_grad()
def test_swin_in_the_original_naming(recorded: dict[str, Any]) -> None:
    arrays = np.load(GOLDEN / "end_to_end_expected.npz")
    sizes = recorded["config"]["swin"]
    backbone = Backbone(
        BackboneConfig(
            image_size=sizes["img_size"],
            embed_dim=sizes["embed_dim"],
            depths=tuple(sizes["depths"]),
            num_heads=tuple(sizes["num_heads"]),
            window_size=sizes["window"],
        )
    ).eval()
    load_tensors(backbone, read_tensors(GOLDEN / "swin_microsoft_format.pth"))
    close(backbone(torch.from_numpy(arrays["images"])), torch.from_numpy(arrays["swin_features"]))


def test_the_published_vocabulary(shared: Path) -> None:
    path = shared / "golden" / "expansionnet_v2" / "official_tokens.pickle"
    if not path.is_file():
        pytest.skip(f"no published vocabulary at {path}")
    vocabulary = read_expansionnet_vocabulary(path)
    assert len(vocabulary) == 10_000
    assert list(vocabulary.words) == sorted(vocabulary.words) and vocabulary.words[0] == "\n"
