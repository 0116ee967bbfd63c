"""The gradient of every objective by finite differences, in float64, with the captions that were sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.training.batches import Batch, target_positions
from raycap.pipeline.training.objectives import cross_entropy_objective, scst_objective, smoothed_cross_entropy

IMAGES, SAMPLES, LENGTH, VOCABULARY = 3, 3, 6, 9
PAD, SOS, EOS = 0, 1, 2
STEP = 1e-6
SMALL: dict[str, Any] = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
SYSTEMS: dict[str, ModelConfig] = {
    "transformer": ExpansionNetConfig(**SMALL, name="transformer", dropout=0.2),
    "expansionnet_v2": ExpansionNetConfig(**SMALL, static_expansion=(3,), dynamic_expansion=2, dropout=0.2),
    "meshed_memory": MeshedMemoryConfig(**SMALL, num_memory_slots=2, dropout=0.2),
    "clustformer": ClustFormerConfig(**SMALL, dropout=0.2),
    "mask_token": ClustFormerConfig(**SMALL, dropout=0.2, decoder="mask_token"),
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "xe": {"objective": "cross_entropy", "label_smoothing": 0.1},
    "xe_plain": {"objective": "cross_entropy", "label_smoothing": 0},
    "leave_one_out": {},
    "mean": {"baseline": "mean"},
    "greedy": {"baseline": "greedy", "fixed_length": 7},
    "beam": {"sampler": "beam", "eos_in_loss": False},
    "divided": {"divide_by_deviation": True},
    "grpo": {"divide_by_deviation": True, "baseline": "mean", "kl": 0.5},
    "kl": {"kl": 0.7, "fixed_length": 7},
    "kl_of_words": {"kl": 0.7, "eos_in_loss": False},
    "kl_greedy": {"kl": 2.0, "baseline": "greedy", "temperature": 1.5},
    "sampling_dropout": {"kl": 0.7, "sampling_dropout": True, "divide_by_deviation": True},
}


def reward_of(tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Any number that depends on the words and the image."""
    places = torch.arange(1, tokens.shape[1] + 1)
    return ((tokens * places).sum(1) * (indices + 2) % 7).double(), {}


class Loss:
    """The loss of one micro-step as a function of the captioner's weights: equal captions and masks in every call."""

    def __init__(self, config: ModelConfig, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        sizes = ModelSizes(5, VOCABULARY, LENGTH, SOS, EOS, PAD)
        reference, model = (Captioner(build_model(config, sizes)).double() for _ in range(2))
        # the reference has other weights than the model, so that the divergence is far from its minimum
        self.captioner, self.reference, self.rewarded = model.train(), reference.eval(), list[list[int]]()
        values = {"objective": "scst"} | settings
        if values["objective"] == "scst":
            section = {"num_samples": SAMPLES, "max_length": LENGTH}
            values = {"objective": "scst", "scst": section | settings}
        stage = StageSection(name="s", epochs=1, batch_size=IMAGES, lr=1, **values)
        if stage.objective == "cross_entropy":
            self.objective = cross_entropy_objective(stage)
        else:
            self.objective = scst_objective(stage, self.reward, PAD, self.reference)
        tokens = torch.tensor([[SOS, 4, 5, EOS], [SOS, 6, EOS, PAD], [SOS, 3, 8, EOS]])
        features = Features(torch.randn(IMAGES, 4, 5, dtype=torch.float64))
        self.batch = Batch(features, tokens, target_positions(tokens, PAD), torch.arange(IMAGES), 8, IMAGES)

    def reward(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.rewarded.append(tokens.flatten().tolist())
        return reward_of(tokens, indices)

    def __call__(self, wrapped: nn.Module | None = None) -> Tensor:
        torch.manual_seed(5)
        return self.objective(
            wrapped or self.captioner, self.captioner, self.batch, torch.Generator().manual_seed(3)
        ).loss


@pytest.mark.parametrize("system", SYSTEMS)
def test_cross_entropy_is_that_of_the_logits_at_all_positions(system: str) -> None:
    loss = Loss(SYSTEMS[system], OBJECTIVES["xe"])
    loss.captioner.eval()
    tokens = loss.batch.tokens
    logits, targets = loss.captioner(loss.batch.features, tokens[:, :-1]), tokens[:, 1:]
    expected = smoothed_cross_entropy(logits[targets != PAD], targets[targets != PAD], 0.1) / 8
    torch.testing.assert_close(loss(), expected)


@pytest.mark.parametrize(
    ("name", "system"),
    [(name, "transformer") for name in OBJECTIVES]
    + [(name, system) for name in ("grpo", "sampling_dropout") for system in ("meshed_memory", "clustformer")],
)
def test_gradients_are_those_of_finite_differences(name: str, system: str) -> None:
    """Along a random direction of each parameter."""
    loss = Loss(SYSTEMS[system], OBJECTIVES[name])
    loss().backward()  # type: ignore[no-untyped-call]
    gradients, num_far_from_zero = {}, 0
    for key, parameter in loss.captioner.named_parameters():
        gradients[key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    for key, parameter in loss.captioner.named_parameters():
        direction, start = torch.randn_like(parameter), parameter.detach().clone()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.copy_(start + sign * STEP * direction)
                values.append(loss().item())
            parameter.copy_(start)
        found = (gradients[key] * direction).sum().item()
        assert (values[0] - values[1]) / (2 * STEP) == pytest.approx(found, rel=1e-5, abs=1e-6 * scale), key
        num_far_from_zero += abs(found) > 1e-3 * scale
    assert num_far_from_zero > 10
    calls = 2 if name in ("greedy", "kl_greedy") else 1
    assert len(set(map(tuple, loss.rewarded))) <= calls, "a small change of a weight has changed a caption"


def test_the_reference_gets_no_gradient_and_no_dropout() -> None:
    """At the weights of the reference, and without dropout, the divergence and its gradient are 0."""
    loss = Loss(ExpansionNetConfig(**SMALL, name="transformer", dropout=0.0), {"kl": 0.7})
    losses = {}
    for kl in (0.0, 1000.0):
        stage = StageSection(
            name="s", objective="scst", epochs=1, batch_size=IMAGES, lr=1,
            scst={"num_samples": SAMPLES, "max_length": LENGTH, "kl": kl},  # type: ignore[arg-type]
        )  # fmt: skip
        reference = copy.deepcopy(loss.captioner).eval().requires_grad_(False)
        loss.objective = scst_objective(stage, reward_of, PAD, reference if kl else None)
        loss.captioner.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in loss.captioner.parameters() if p.grad is not None])
        losses[kl] = value.item(), gradient
        assert all(parameter.grad is None for parameter in reference.parameters())
    assert losses[0.0][0] == losses[1000.0][0]
    torch.testing.assert_close(losses[0.0][1], losses[1000.0][1], rtol=1e-9, atol=1e-10)
