"""The exponential moving average of a stage's weights, which is validated and kept in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from raycap.models.captioner import Captioner

WARM_UP_STEPS = 10


class WeightAverage:
    """The average a of the trained weights w: after step t, counted from 0, a <- d a + (1 - d) w.

    d is `decay`, but at most (1 + t) / (WARM_UP_STEPS + t), so that the weights before the stage are soon forgotten.
    It takes as much memory as the weights.
    """

    def __init__(self, captioner: Captioner, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: each for name, each in captioner.named_parameters() if each.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after the step with this number."""
        decay = min(self.decay, (1 + step) / (WARM_UP_STEPS + step))
        for name, parameter in self.parameters.items():
            self.weights[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In a `with` block, the captioner has the average as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Continues from the average in a checkpoint."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
