"""Metrics of the steps between two journal entries: means over steps and ranks, speed, time spent waiting for data.

They stay on the device until an entry is written, so that a step does not wait for a GPU.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from raycap.pipeline.runtime.context import Context, sum_over_ranks
from raycap.pipeline.runtime.processor import memory_mb
from raycap.pipeline.runtime.system_metrics import system_metrics


def summed(sums: dict[str, Tensor], metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums with `metrics` added. The first metrics decide about the names."""
    return {key: sums[key] + value for key, value in metrics.items()} if sums else metrics


class StepMetrics:
    """Collects one rank's metrics of the optimizer steps for one journal entry."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.sums: dict[str, Tensor] = {}
        self.steps, self.wait_s = 0, 0.0
        self.begin = self.last_step_end = time.monotonic()

    def batch_arrived(self) -> None:
        """Counts the time since the last step as time spent waiting for data."""
        self.wait_s += time.monotonic() - self.last_step_end

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Adds this rank's metrics of one step, float64 scalars on the context's device."""
        self.sums = summed(self.sums, metrics)
        self.steps += 1
        self.last_step_end = time.monotonic()

    def summary(self, batch_size: int) -> dict[str, float]:
        """The metrics of these steps, equal on every rank. Every rank must call this method at the same step.

        batch_size: images per step over all ranks. In the result, data_wait is the share of the time spent waiting.
        """
        device, keys = self.context.device, sorted(self.sums)
        wait_s = torch.tensor(self.wait_s, dtype=torch.float64, device=device)
        *sums, total_wait_s = sum_over_ranks(
            self.context, torch.stack([*(self.sums[key] for key in keys), wait_s])
        ).tolist()
        elapsed = time.monotonic() - self.begin  # after `tolist`, which waits for the device
        means = {key: value / self.steps for key, value in zip(keys, sums, strict=True)}
        reward_sq_mean = means.pop("reward_sq_mean", None)
        if reward_sq_mean is not None:
            means["reward_std"] = math.sqrt(max(0.0, reward_sq_mean - means["reward"] ** 2))
        return {
            **means,
            "images_per_s": batch_size * self.steps / elapsed,
            "data_wait": total_wait_s / self.context.world_size / elapsed,
            "memory_mb": memory_mb(device),
            **system_metrics(device),
        }
