"""The energy of captions: against a plain loop, and what it depends on."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.captioner import build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.pipeline.evaluation.captioning.search import caption_energies
from tests.support.models import select_images

SIZES = ModelSizes(feature_width=6, vocabulary_size=11, max_positions=8, sos=0, eos=1, pad=2)
SMALL = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.5}
SYSTEMS: list[ModelConfig] = [
    ExpansionNetConfig(**SMALL, static_expansion=(4,), dynamic_expansion=3),  # type: ignore[arg-type]
    ExpansionNetConfig(**SMALL, name="transformer"),  # type: ignore[arg-type]
    MeshedMemoryConfig(**SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL, decoder="mask_token"),  # type: ignore[arg-type]
    ClustFormerConfig(**SMALL, inputs="regions", sampling=1, region_rows=2),  # type: ignore[arg-type]
]


def drawn_captions(chance: random.Random, count: int) -> tuple[Tensor, Tensor]:
    """Captions of 1 to 8 tokens after SOS, of which the longest has no EOS: tokens (count, 9) and lengths (count,)."""
    lengths = [9, 2, *(chance.randint(2, 9) for _ in range(count - 2))]
    rows = []
    for length in lengths:
        row = [0, *(chance.randint(3, 10) for _ in range(length - 2)), 1]
        rows.append((row if length < 9 else [*row[:-1], 5]) + [2] * (9 - length))
    return torch.tensor(rows), torch.tensor(lengths)


def plain_energy(model: CaptionModel, memory: Memory, tokens: list[int], count: int) -> float:
    """The energy of one caption of one image, without padding, token by token."""
    total, words = 0.0, range(min(len(tokens) - 1, count))
    for position in words:
        logits = model.decode(memory, torch.tensor([tokens[: position + 1]]))[0, -1]
        total -= math.log(sum(math.exp(value) for value in logits.tolist()))
    return total / len(words)


@pytest.mark.parametrize(
    "config",
    SYSTEMS,
    ids=lambda config: f"{config.name} {getattr(config, 'decoder', '')} {getattr(config, 'inputs', '')}",
)
@torch.no_grad()
def test_energies_against_a_plain_loop(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = build_model(config, SIZES).double().eval()
    chance = random.Random(0)
    tokens, lengths = drawn_captions(chance, 7)
    is_grid = isinstance(config, ClustFormerConfig) and config.inputs != "regions"
    padding = None if is_grid else torch.tensor([4, 3, 2, 4, 1, 4, 3])
    corners = torch.rand(7, 4, 2, dtype=torch.float64)
    boxes = None if is_grid else torch.cat((corners, corners + 1), -1)
    features = Features(torch.randn(7, 4, 6, dtype=torch.float64), padding, boxes)
    memory = model.encode(features)
    model.train()  # in this mode, which stays, dropout must not act
    for count in (1, 3, 4, 20):
        found = caption_energies(model, memory, tokens, lengths, count)
        assert model.training and found.shape == (7,) and found.dtype == torch.float64
        model.eval()
        for row, (caption, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            alone = select_images(memory, torch.tensor([row]))
            assert float(found[row]) == pytest.approx(plain_energy(model, alone, caption[:length], count), abs=1e-9)
        model.train()


@torch.no_grad()
def test_the_level_of_the_logits_changes_the_energy_only() -> None:
    torch.manual_seed(0)
    model = build_model(SYSTEMS[0], SIZES).eval()
    memory = model.encode(Features(torch.randn(5, 4, 6)))
    tokens, lengths = drawn_captions(random.Random(1), 5)
    before, log_probs = caption_energies(model, memory, tokens, lengths, 4), model.decode(memory, tokens[:, :-1])
    model.lm_head.bias += 3.0  # type: ignore[operator, union-attr]
    after = caption_energies(model, memory, tokens, lengths, 4)
    assert (before - after).tolist() == pytest.approx([3.0] * 5, abs=1e-5) and after.dtype == torch.float32
    assert torch.allclose(log_probs.log_softmax(-1), model.decode(memory, tokens[:, :-1]).log_softmax(-1), atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = caption_energies(model, memory, tokens, lengths, 4)
    assert rounded.dtype == torch.float32 and rounded.tolist() == pytest.approx(after.tolist(), abs=0.05)
