"""Metrics of the steps between two journal entries: means over steps and ranks, speed, time spent waiting for data."""

from __future__ import annotations

import math
import time

import torch

from pipeline.runtime.context import Context, sum_over_ranks
from pipeline.runtime.cpu import memory_mb
from pipeline.runtime.system_metrics import system_metrics


class StepMetrics:
    """Collects the metrics of optimizer steps on one rank."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.reset()

    def reset(self) -> None:
        """Forgets the steps so far."""
        self.sums: dict[str, float] = {}
        self.steps, self.wait_s = 0, 0.0
        self.begin = self.last_step_end = time.monotonic()

    def batch_arrived(self) -> None:
        """Counts the time since the last step as time spent waiting for data."""
        self.wait_s += time.monotonic() - self.last_step_end

    def add(self, metrics: dict[str, float]) -> None:
        """Adds this rank's metrics of one step."""
        for key, value in metrics.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.steps += 1
        self.last_step_end = time.monotonic()

    def summary(self, batch_size: int) -> dict[str, float]:
        """The metrics since the last reset, equal on every rank, followed by a reset.

        This is a collective operation: every rank must call it at the same step.
        """
        elapsed = time.monotonic() - self.begin
        keys = sorted(self.sums)
        device = self.context.device if self.context.device.type == "cuda" else torch.device("cpu")
        values = torch.tensor([*(self.sums[key] for key in keys), self.wait_s], dtype=torch.float64, device=device)
        *sums, wait_s = sum_over_ranks(self.context, values).tolist()
        means = {key: value / self.steps for key, value in zip(keys, sums, strict=True)}
        reward_sq_mean = means.pop("reward_sq_mean", None)
        if reward_sq_mean is not None:
            means["reward_std"] = math.sqrt(max(0.0, reward_sq_mean - means["reward"] ** 2))
        result = {
            **means,
            "images_per_s": batch_size * self.steps / elapsed,
            "data_wait": wait_s / self.context.world_size / elapsed,
            "memory_mb": memory_mb(self.context.device),
            **system_metrics(self.context.device),
        }
        self.reset()
        return result
