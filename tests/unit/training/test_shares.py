"""Unequal shares: however many workers share a batch, their gradients add up to those of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycap.models.base import Features, Memory
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.decoding import search as decoding
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.training import objectives
from raycap.pipeline.training.batches import Batches, CaptionTokens, share
from raycap.pipeline.training.objectives import Objective, cross_entropy_objective, scst_objective
from tests.support.models import select_images

NUM_IMAGES = 17
WORDS = ("PAD", "SOS", "EOS", "a", "b", "c", "d")
PAD, SOS, EOS = 0, 1, 2
STAGES: dict[str, dict[str, Any]] = {
    "pairs": {"objective": "cross_entropy"},
    "images": {"objective": "cross_entropy", "captions_per_image": 3, "label_smoothing": 0},
    "leave_one_out": {"objective": "scst", "scst": {"num_samples": 3, "max_length": 6}},
    "mean": {"objective": "scst", "scst": {"num_samples": 2, "max_length": 6, "baseline": "mean"}},
    "greedy": {"objective": "scst", "scst": {"num_samples": 2, "max_length": 6, "baseline": "greedy"}},
    "beam": {"objective": "scst", "scst": {"num_samples": 3, "max_length": 6, "sampler": "beam", "fixed_length": 6}},
    "kl": {"objective": "scst", "scst": {"num_samples": 3, "max_length": 6, "kl": 0.5, "divide_by_deviation": True}},
}


@given(st.integers(1, 300), st.integers(1, 40))
def test_shares_cover_a_batch(size: int, count: int) -> None:
    """Each sample is in one share, shares differ by one sample at most, and equal shares are those of a division."""
    shares = [np.arange(size)[share(size, index, count)] for index in range(count)]
    assert np.concatenate(shares).tolist() == list(range(size))
    assert {len(part) for part in shares} <= {size // count, -(-size // count)}
    if size % count == 0:
        assert np.array_equal(np.stack(shares), np.arange(size).reshape(count, -1))


class FakeImages:
    """Images whose features depend on their numbers only."""

    transform = None
    features = torch.randn(NUM_IMAGES, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_IMAGES

    def load(self, rows: np.ndarray, seeds: np.ndarray) -> Features:
        return Features(self.features[torch.from_numpy(rows)])


def caption_tokens() -> CaptionTokens:
    """One to four captions of one to four words per image."""

    def caption(image: int, number: int) -> str:
        return " ".join("abcd"[(image + number) % 4] for _ in range(1 + (3 * image + number) % 4))

    captions = [[caption(image, number) for number in range(1 + image % 4)] for image in range(NUM_IMAGES)]
    ids = [[[SOS, *map(WORDS.index, text.split()), EOS] for text in texts] for texts in captions]
    return CaptionTokens(ids, PAD)


def fake_reward(tokens: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A number in [-1, 1] that depends on a caption's tokens and its image."""
    weights = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64)
    return ((tokens * weights).sum(1) + images).sin(), {}


def sample_by_image(model: Any, memory: Memory, *, generator: object, **limits: Any) -> Any:
    """Samples with random numbers that depend on the image alone, not on its place in a batch."""
    captions = []
    for index in range(memory.batch_size):
        alone = select_images(memory, torch.tensor([index]))
        seed = int(alone.states.abs().sum() * 1e6)
        tokens = decoding.sample(model, alone, generator=torch.Generator().manual_seed(seed), **limits).tokens
        captions.append(torch.nn.functional.pad(tokens, (0, limits["max_length"] - tokens.shape[-1]), value=PAD))
    return SimpleNamespace(tokens=torch.cat(captions))


def small_captioner(seed: int) -> Captioner:
    torch.manual_seed(seed)
    config = ExpansionNetConfig(
        name="expansionnet_v2", d_model=8, d_ff=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1,
        static_expansion=(3,), dynamic_expansion=2, dropout=0.0,
    )  # fmt: skip
    return Captioner(build_model(config, ModelSizes(5, len(WORDS), 8, SOS, EOS, PAD))).double()


def objective_of(stage: StageSection) -> Objective:
    if stage.objective == "cross_entropy":
        return cross_entropy_objective(stage)
    reference = small_captioner(seed=1).eval() if stage.sampling.kl else None
    return scst_objective(stage, fake_reward, PAD, reference)


def step_of(captioner: Captioner, stage: StageSection, world_size: int, step: int) -> tuple[Tensor, dict[str, float]]:
    """The sum of all ranks' gradients of one optimizer step, and of their metrics."""
    captioner.zero_grad()
    metrics: dict[str, float] = {}
    for rank in range(world_size):
        batches = Batches(cast(Any, FakeImages()), caption_tokens(), stage, seed=3, rank=rank, world_size=world_size)
        for batch in batches.at(step):
            output = objective_of(stage)(captioner, captioner, batch, torch.Generator())
            output.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in output.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
    gradients = [parameter.grad.flatten() for parameter in captioner.parameters() if parameter.grad is not None]
    return torch.cat(gradients), metrics


@pytest.mark.parametrize("name", STAGES)
def test_gradients_of_all_ranks_add_up_to_those_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "sample", sample_by_image)
    captioner = small_captioner(seed=0)

    @given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 5))
    @settings(max_examples=5 if "scst" in STAGES[name] else 20, deadline=None)
    def check(world_size: int, accumulation_steps: int, more: int, step: int) -> None:
        common = {"name": "s", "epochs": 1, "lr": 1, "batch_size": world_size * accumulation_steps + more}
        whole = StageSection.model_validate(common | STAGES[name])
        shared = whole.model_copy(update={"gradient_accumulation_steps": accumulation_steps})
        one, metrics_of_one = step_of(captioner, whole, 1, step)
        several, metrics = step_of(captioner, shared, world_size, step)
        assert float((several - one).norm()) <= 1e-9 * float(one.norm())
        for key in metrics.keys() - {"entropy"}:  # an estimate from each micro-step's own tokens
            assert metrics[key] == pytest.approx(metrics_of_one[key], rel=1e-9, abs=1e-12), key

    check()
