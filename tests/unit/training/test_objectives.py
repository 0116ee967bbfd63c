"""Losses against slow second implementations, and the settings of SCST against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.models.base import Features
from raycap.models.captioner import Captioner, build_model
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.pipeline.config.sections import ScstSection, StageSection
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.objectives import (
    DEVIATION_EPS,
    advantages_of,
    caption_divergences,
    scst_objective,
    smoothed_cross_entropy,
)


@given(st.integers(2, 30), st.sampled_from([0.0, 0.01, 0.1, 0.5]), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_label_smoothing_is_a_divergence_from_the_smoothed_target(size: int, smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, size, dtype=torch.float64, generator=generator)
    targets = torch.randint(1, size, (2, 5), generator=generator)
    targets[1, 3:] = 0
    slow = 0.0
    for row, target in zip(logits.reshape(-1, size), targets.reshape(-1), strict=True):
        if target != 0:
            goal = torch.full((size,), smoothing / (size - 1), dtype=torch.float64)
            goal[target] = 1 - smoothing
            slow += float(torch.nn.functional.kl_div(row.log_softmax(-1), goal, reduction="sum"))
    fast = smoothed_cross_entropy(logits[targets != 0], targets[targets != 0], smoothing)
    assert float(fast) == pytest.approx(slow, rel=1e-10, abs=1e-10)


def scst_loss(**settings: Any) -> tuple[float, torch.Tensor]:
    """The loss of a tiny Transformer on two images, and the log-probabilities (2, 3) of the sampled captions."""
    torch.manual_seed(0)
    config = ExpansionNetConfig(name="transformer", d_model=8, d_ff=8, num_heads=2, dropout=0.0)
    captioner = Captioner(build_model(config, ModelSizes(5, 6, 8, 1, 2, 0)))
    section = {"num_samples": 3, "max_length": 6} | settings
    stage = StageSection(name="s", objective="scst", epochs=1, batch_size=2, lr=1, scst=section)
    sampled = []

    def reward(tokens: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sampled.append(tokens)
        return torch.arange(len(tokens)).double().square(), {}

    tokens = torch.zeros(2, 2, dtype=torch.int64)
    batch = Batch(Features(torch.randn(2, 4, 5)), tokens, torch.arange(0), torch.arange(2), 4, 2)
    run = scst_objective(stage, reward, 0)
    loss = run(captioner, captioner, batch, torch.Generator().manual_seed(3)).loss
    tokens = sampled[0]
    with torch.no_grad():
        logs = captioner(batch.features, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    scored = tokens[:, 1:] != 0
    if settings.get("eos_in_loss") is False:
        scored &= tokens[:, 1:] != 2
    assert bool((tokens == 2).any()), "no sampled caption ends"
    return float(loss.detach()), (logs * scored).sum(1).view(2, 3)


def test_the_named_settings_of_the_scst_loss() -> None:
    """Baseline, EOS in the loss and division by a fixed length, each against its definition."""
    rewards = torch.arange(6).double().square().view(2, 3)
    plain, logs = scst_loss(baseline="mean")
    expected = -((rewards - rewards.mean(1, keepdim=True)) * logs).sum() / 6
    assert plain == pytest.approx(float(expected), rel=1e-5)
    others = (rewards.sum(1, keepdim=True) - rewards) / 2
    assert scst_loss()[0] == pytest.approx(float(-((rewards - others) * logs).sum() / 6), rel=1e-5)
    assert scst_loss(baseline="mean", fixed_length=20)[0] == pytest.approx(plain / 20, rel=1e-5)
    without, words = scst_loss(baseline="mean", eos_in_loss=False)
    assert without == pytest.approx(float(-((rewards - rewards.mean(1, keepdim=True)) * words).sum() / 6), rel=1e-5)
    assert without != pytest.approx(plain, rel=1e-3)
    assert scst_loss(baseline="mean", eos_in_reward=False)[0] == pytest.approx(plain), "it is the reward's alone"


@given(st.integers(1, 5), st.integers(2, 7), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_leave_one_out_is_the_centered_reward_times_a_constant(images: int, count: int, seed: int) -> None:
    """It is n / (n - 1) x (reward - mean of all rewards). Division by the deviation keeps this."""
    rewards = torch.rand(images, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rewards[0] = rewards[0, 0]  # all equal
    by_baseline = {}
    for divides in (False, True):
        for baseline in ("mean", "leave_one_out"):
            section = ScstSection(num_samples=count, baseline=baseline, divide_by_deviation=divides)  # type: ignore[arg-type]
            by_baseline[baseline] = advantages_of(rewards, section)
            assert by_baseline[baseline][0].abs().max() < 1e-9
        plain = by_baseline["mean"]
        torch.testing.assert_close(by_baseline["leave_one_out"], count / (count - 1) * plain, rtol=1e-9, atol=1e-9)
        for row, values in zip(plain.tolist(), rewards.tolist(), strict=True):
            mean = sum(values) / count
            deviation = (sum((value - mean) ** 2 for value in values) / count) ** 0.5 + DEVIATION_EPS
            expected = [(value - mean) / (deviation if divides else 1) for value in values]
            assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_divergence_is_that_of_the_definition() -> None:
    """Compared with torch's, over positions up to the caption's end. Logits in bfloat16 are converted to float32."""
    logits, others = torch.randn(2, 3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    tokens = torch.tensor([[1, 4, 2, 0, 0], [1, 4, 5, 6, 3], [1, 2, 0, 0, 0]])
    found = caption_divergences(logits, others, tokens, 0)
    for row, length in enumerate((2, 4, 1)):
        slow = sum(
            torch.distributions.kl_divergence(
                torch.distributions.Categorical(logits=logits[row, t]),
                torch.distributions.Categorical(logits=others[row, t]),
            ).item()
            for t in range(length)
        )
        assert found[row].item() == pytest.approx(slow, rel=1e-10) and slow > 0
    halves = caption_divergences(logits.bfloat16(), others.bfloat16(), tokens, 0)
    assert halves.dtype == torch.float32 and halves.tolist() == pytest.approx(found.tolist(), rel=0.05)
    assert caption_divergences(logits, logits, tokens, 0).tolist() == [0.0, 0.0, 0.0]


def test_the_divergence_and_the_rewards_are_logged_by_name() -> None:
    torch.manual_seed(0)
    config = ExpansionNetConfig(name="transformer", d_model=8, d_ff=8, num_heads=2, dropout=0.0)
    captioner, reference = (Captioner(build_model(config, ModelSizes(5, 6, 8, 1, 2, 0))) for _ in range(2))
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    batch = Batch(Features(torch.randn(2, 4, 5)), tokens, torch.arange(0), torch.arange(2), 4, 2)
    section = {"num_samples": 3, "max_length": 6, "kl": 0.5}
    stage = StageSection(name="s", objective="scst", epochs=1, batch_size=2, lr=1, scst=section)  # type: ignore[arg-type]
    parts = {"ciderd": torch.arange(6).double(), "length": torch.full((6,), 3.0).double()}
    sampled = []

    def metrics_of(summands: dict[str, torch.Tensor], reference: Captioner | None) -> dict[str, torch.Tensor]:
        def reward(tokens: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            sampled.append(tokens)
            return torch.arange(6).double(), summands

        run = scst_objective(stage, reward, 0, reference)
        return run(captioner, captioner, batch, torch.Generator().manual_seed(3)).metrics

    metrics = metrics_of(parts, reference.eval())
    assert metrics["reward_ciderd"] == 2.5 == metrics["reward"] and metrics["reward_length"] == 3.0
    with torch.no_grad():
        logits, others = (each(batch.features, sampled[0][:, :-1]) for each in (captioner, reference))
    divergence = caption_divergences(logits, others, sampled[0], 0).mean().item()
    assert metrics["kl"].item() == pytest.approx(divergence, rel=1e-5) and divergence > 0
    plain = metrics_of({"ciderd": parts["ciderd"]}, None)
    assert not [name for name in plain if name.startswith("reward_") and name != "reward_sq_mean"] and "kl" not in plain
    difference = metrics["loss"].item() - plain["loss"].item()
    assert difference == pytest.approx(0.5 * divergence, rel=1e-4)
