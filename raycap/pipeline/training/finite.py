"""The check that loss and gradient stay finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class DivergedError(RuntimeError):
    """The loss or the gradient is not finite. The message names stage, step and rank."""


class FiniteCheck:
    """Raises DivergedError for a number of a training step that is infinite or NaN.

    To read a number, the processor must wait for a GPU. There the numbers stay on the device until `require`, which
    must be called before weights are written. Elsewhere each step is checked at once, before its update.
    """

    def __init__(self, stage: str, rank: int, *, defers: bool) -> None:
        """defers: keep the numbers until `require`."""
        self.stage, self.rank, self.defers = stage, rank, defers
        self._kept: list[tuple[int, dict[str, Tensor]]] = []  # the numbers of each step by their name

    def add(self, step: int, numbers: dict[str, Tensor]) -> None:
        """Adds the scalars of a step, by the name that a message gives them."""
        self._kept.append((step, numbers))
        if not self.defers:
            self.require()

    def require(self) -> None:
        """Raises DivergedError if a number since the last call is not finite. The message names the first one."""
        kept, self._kept = self._kept, []
        names = [(step, name) for step, numbers in kept for name in numbers]
        values = [number.detach().double() for _, numbers in kept for number in numbers.values()]
        for (step, name), value in zip(names, torch.stack(values).tolist() if values else [], strict=True):
            if not math.isfinite(value):
                raise DivergedError(
                    f"the {name} is {value} in stage {self.stage}, step {step}, rank {self.rank}; "
                    "the last good checkpoint stays: lower lr or add max_grad_norm"
                )
