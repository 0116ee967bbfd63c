"""Metrics of the steps between two journal entries: means over the steps, speed, and the time spent waiting for data.

The metrics stay on the device until an entry is written, so that a step does not wait for a GPU.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from raycap.pipeline.runtime.context import Context, sum_over_ranks
from raycap.pipeline.runtime.processor import memory_mb


def summed(sums: dict[str, Tensor], metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds metrics to sums with the same names. If there are no sums yet, returns the metrics."""
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

        batch_size: images per step over all ranks. In the result, data_wait is the fraction of the time spent waiting
        for data, from 0 to 1.
        """
        device, keys = self.context.device, sorted(self.sums)
        wait_s = torch.tensor(self.wait_s, dtype=torch.float64, device=device)
        shares = torch.stack([*(self.sums[key] for key in keys), wait_s])
        *sums, total_wait_s = sum_over_ranks(self.context, shares).tolist()
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
        }


class DivergedError(RuntimeError):
    """The loss or the gradient is not finite. The message names stage, step and rank."""


class FiniteCheck:
    """Raises DivergedError if a number of a training step is infinite or NaN.

    On a CPU, each step is checked before its update. On a GPU, reading a number makes the processor wait, so numbers
    stay on the GPU until `require` is called. Weights may be written only after such a call.
    """

    def __init__(self, stage: str, rank: int, *, defers: bool) -> None:
        """defers: if true, only `require` checks numbers, as on a GPU."""
        self.stage, self.rank, self.defers = stage, rank, defers
        self._kept: list[tuple[int, str, Tensor]] = []  # step, name and value of each number

    def add(self, step: int, numbers: dict[str, Tensor]) -> None:
        """Adds the scalars of a step. numbers: by the name that the error gives them."""
        self._kept += [(step, name, number) for name, number in numbers.items()]
        if not self.defers:
            self.require()

    def require(self) -> None:
        """Raises DivergedError if a number added since the last call is not finite. The message names the first."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        # The numbers are read together, because each reading makes the processor wait for a GPU.
        values = torch.stack([number.detach().double() for _, _, number in kept]).tolist()
        for (step, name, _), value in zip(kept, values, strict=True):
            if not math.isfinite(value):
                raise DivergedError(
                    f"the {name} is {value} in stage {self.stage}, step {step}, rank {self.rank}; "
                    "the last good checkpoint stays: lower lr or add max_grad_norm"
                )
