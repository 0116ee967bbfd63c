"""The Meshed-Memory Transformer against tensors recorded from the reference implementation (shared golden files)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycap.jobs.cli import main
from raycap.jobs.import_ import import_checkpoint
from raycap.models.base import CaptionModel, Features
from raycap.models.convert.tensor_files import read_tensors
from raycap.models.decoding.search import ScoreRules, beam_search
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.upstream import read_meshed_vocabulary
from tests.support.golden import MESHED_MEMORY as GOLDEN
from tests.support.golden import MESHED_WORDS as WORDS
from tests.support.golden import write_published_form


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def training_checkpoint(path: Path, legacy: bool, **extra: Any) -> Path:
    """The golden weights as a training run of the reference saves them: random states and optimizer beside them."""
    state = read_tensors(GOLDEN / "checkpoint.pth")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    content = {
        "torch_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.RandomState(0).get_state(),
        "random_rng_state": random.Random(0).getstate(),
        "epoch": 3,
        "val_cider": np.float64(1.25),
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0).state_dict(),
    } | extra
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    arrays = np.load(GOLDEN / "expected.npz")
    values = json.loads((GOLDEN / "expected.json").read_text())
    return values | {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CaptionModel:
    """Imported by the command line, with a vocabulary in our own form."""
    folder = tmp_path_factory.mktemp("meshed")
    Vocabulary(("UNK", "PAD", "SOS", "EOS", *WORDS[4:]), "spacy").save(folder / "vocabulary.json")
    arguments = ["--checkpoint", str(GOLDEN / "checkpoint.pth"), "--tokens", str(folder / "vocabulary.json")]
    assert (
        main(
            [
                "import",
                "--from",
                "meshed_memory",
                *arguments,
                "--out",
                str(folder / "bundle"),
                "--set",
                "model.num_heads=4",
                "--set",
                "model.attended_regions=null",
            ]
        )
        == 0
    )
    return load_bundle(folder / "bundle").captioner.model


@torch.no_grad()
def test_every_encoder_level_and_log_probabilities(model: CaptionModel, recorded: dict[str, Any]) -> None:
    memory = model.encode(Features(recorded["features"]))
    close(memory.states, recorded["encoder_output"])
    tokens = recorded["tokens"]
    real = tokens != recorded["pad"]
    assert not real.all()
    close(model.decode(memory, tokens).log_softmax(-1)[real], recorded["log_probs"][real])


@torch.no_grad()
def test_lengths_hide_what_the_reference_attends_to(model: CaptionModel, recorded: dict[str, Any]) -> None:
    """Zero rows behind the regions change nothing, in the encoder and in cross-attention."""
    features, tokens = recorded["features"], recorded["tokens"]
    padded = torch.cat((features, torch.zeros(3, 4, features.shape[2])), 1)
    lengths = torch.tensor([7, 7, 7])
    close(model(Features(padded, lengths), tokens), model(Features(features), tokens))
    assert (model(Features(padded), tokens) - model(Features(features), tokens)).abs().max() > 1e-2


@torch.no_grad()
def test_attended_padding_is_a_row_of_zeros(tmp_path: Path, model: CaptionModel, recorded: dict[str, Any]) -> None:
    """An imported checkpoint attends 50 regions, as the reference, which stacks zeros below those of a detector.

    The masked model shows what the reference computes if it gets these zeros as regions of their own.
    """
    Vocabulary(("UNK", "PAD", "SOS", "EOS", *WORDS[4:]), "spacy").save(tmp_path / "vocabulary.json")
    import_checkpoint(
        "meshed_memory",
        checkpoint=GOLDEN / "checkpoint.pth",
        tokens=tmp_path / "vocabulary.json",
        out=tmp_path / "bundle",
        overrides=["model.num_heads=4"],
    )
    attending = load_bundle(tmp_path / "bundle").captioner.model
    assert attending.config.attended_regions == 50  # type: ignore[attr-defined]
    features, tokens, lengths = recorded["features"], recorded["tokens"], torch.tensor([7, 2, 5])
    stacked = torch.zeros(3, 50, features.shape[2])
    for image, length in enumerate(lengths.tolist()):
        stacked[image, :length] = features[image, :length]
    ours, reference = attending(Features(features, lengths), tokens), model(Features(stacked), tokens)
    close(ours, reference)
    assert (model(Features(features, lengths), tokens) - reference).abs().max() > 1e-2, "masking is another model"
    found, plain = (
        beam_search(each, each.encode(inputs), beam_size=3, max_length=9, num_results=3)
        for each, inputs in ((attending, Features(features, lengths)), (model, Features(stacked)))
    )
    assert torch.equal(found.tokens, plain.tokens)
    wide = torch.cat((stacked, torch.zeros(3, 30, features.shape[2])), 1)  # of a store for up to 80 regions
    close(attending(Features(wide, lengths), tokens), reference)
    for number in (None, torch.tensor([51, 2, 2])):
        with pytest.raises(ValueError, match=r"an image has \d\d regions, and model.attended_regions is 50"):
            attending.encode(Features(wide, number))


def test_every_beam(model: CaptionModel, recorded: dict[str, Any]) -> None:
    memory = model.encode(Features(recorded["features"]))
    length = recorded["config"]["beam_len"] + 1  # the reference's counts without the first token
    found = beam_search(
        model, memory, beam_size=5, max_length=length, num_results=5, rules=ScoreRules(length_normalization=False)
    )
    for image in range(3):
        for beam in range(5):
            expected = recorded["beam_sequences"][image, beam].tolist()
            count = expected.index(recorded["eos"]) + 1 if recorded["eos"] in expected else len(expected)
            assert found.tokens[image, beam, 1 : count + 1].tolist() == expected[:count]
            close(found.log_probs[image, beam, 1 : count + 1], recorded["beam_log_probs"][image, beam, :count], 1e-4)
            assert int(found.lengths[image, beam]) == count + 1


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_checkpoint_with_its_baggage(
    tmp_path: Path, legacy: bool, model: CaptionModel, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published: random states of NumPy and Python beside the weights, the vocabulary as a pickled object."""
    tokens = write_published_form(tmp_path / "vocab.pkl", WORDS, monkeypatch)
    import_checkpoint(
        "meshed_memory",
        checkpoint=training_checkpoint(tmp_path / "m2.pth", legacy),
        tokens=tokens,
        out=tmp_path / "bundle",
        overrides=["model.num_heads=4", "model.attended_regions=null"],
    )
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.vocabulary.words[:5] == ("UNK", "PAD", "SOS", "EOS", "word0")
    assert bundle.vocabulary.tokenizer == "spacy"
    sizes = bundle.captioner.model.sizes
    assert (sizes.sos, sizes.eos, sizes.pad) == (recorded["bos"], recorded["eos"], recorded["pad"])
    ours, theirs = bundle.captioner.model.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_in_these_files_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sprung, allowed = tmp_path / "sprung", set(torch.serialization.get_safe_globals())
    for change in ({"freqs": Trap(sprung)}, {"itos": Trap(sprung)}, {"other": Trap(sprung)}):
        path = write_published_form(tmp_path / "trap.pkl", WORDS, monkeypatch, **change)
        with pytest.raises(ValueError, match="is refused: it names"):
            read_meshed_vocabulary(path)
    for legacy in (False, True):
        path = training_checkpoint(tmp_path / "trap.pth", legacy, numpy_rng_state=Trap(sprung))
        with pytest.raises(ValueError, match="is refused"):
            read_tensors(path)
    assert not sprung.exists()
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.fc.weight", (8, 3, 1)),
        ("encoder.layers.0.mhatt.attention.m_k", (5,)),
        ("encoder.layers.1.mhatt.attention.m_v", ()),
        ("decoder.pos_emb.weight", (0, 8)),
        ("decoder.layers.0.self_att.attention.fc_k.weight", (8,)),
    ],
)
def test_tensors_of_another_shape_are_told_in_a_sentence(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Whatever a file holds, importing it ends in a sentence that names a tensor."""
    tensors = dict(read_tensors(GOLDEN / "checkpoint.pth"))
    assert name in tensors
    torch.save({"state_dict": tensors | {name: torch.zeros(shape)}}, tmp_path / "odd.pth")
    Vocabulary(("UNK", "PAD", "SOS", "EOS", *WORDS[4:]), "spacy").save(tmp_path / "vocabulary.json")
    with pytest.raises(UserError, match="shape") as caught:
        import_checkpoint(
            "meshed_memory",
            checkpoint=tmp_path / "odd.pth",
            tokens=tmp_path / "vocabulary.json",
            out=tmp_path / "out",
            overrides=["model.num_heads=4"],
        )
    assert "unpack" not in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
