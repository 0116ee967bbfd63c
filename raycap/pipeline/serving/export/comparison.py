"""Compares exported graphs with the model that they were made from, on random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from raycap.models.convert.export_graphs import EncoderGraph, GraphTensor, StepGraph

Graph = Callable[[Sequence[np.ndarray]], list[np.ndarray]]

BATCHES = ((1, 4), (3, 5))  # numbers of images, and of image tokens for models of features
BEAMS, STEPS = 3, 5
# Largest differences of a good export: rounding in another order, and for float16 rounding itself.
TOLERANCES = {"float32": 1e-3, "float16": 0.5}


@dataclass(frozen=True)
class Exported:
    """The graphs of an exported captioner, and the tensors of its cache with examples in its precision."""

    encoder: Graph
    step: Graph
    cache: Sequence[GraphTensor]


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences of the encoder's result and of log-probabilities."""

    memory: float
    log_probs: float

    def are_small(self, precision: str) -> bool:
        return max(self.memory, self.log_probs) <= TOLERANCES[precision]

    def __str__(self) -> str:
        return f"{self.memory:.1e} in the encoder's result and {self.log_probs:.1e} in log-probabilities"


def compare_graphs(encoder: EncoderGraph, step: StepGraph, exported: Exported) -> Differences:
    """The differences between a captioner's graphs in PyTorch and exported ones; infinite where a number is NaN.

    Each has its own cache. The inputs are drawn by torch's default generator.
    """
    import torch

    of_memory, of_log_probs = [0.0], [0.0]
    with torch.no_grad():
        for images, image_tokens in BATCHES:
            inputs = [each.example for each in encoder.inputs(images, image_tokens)]
            memory, exported_memory = encoder(*inputs), exported.encoder([each.numpy() for each in inputs])
            of_memory += [_difference(*pair) for pair in zip(memory, exported_memory, strict=True)]
            cache = _empty(step.cache, images)
            exported_cache = [each.numpy() for each in _empty(exported.cache, images)]
            parents = torch.arange(images)[:, None]
            for _ in range(min(STEPS, step.model.sizes.max_positions)):
                tokens = torch.randint(step.model.sizes.vocabulary_size, parents.shape)
                log_probs, *cache = step(tokens, parents, *memory, *cache)
                beams = [tokens.numpy(), parents.numpy()]
                exported_log_probs, *exported_cache = exported.step([*beams, *exported_memory, *exported_cache])
                of_log_probs.append(_difference(log_probs, exported_log_probs))
                chosen = torch.randint(tokens.shape[1], (images, BEAMS))
                parents = torch.arange(images)[:, None] * tokens.shape[1] + chosen
    return Differences(max(of_memory), max(of_log_probs))


def _empty(cache: Sequence[GraphTensor], images: int) -> list[Tensor]:
    """The cache before the first step."""
    shapes = ([0 if dim in each.dims else size for dim, size in enumerate(each.example.shape)] for each in cache)
    return [each.example.new_zeros(images, *shape[1:]) for each, shape in zip(cache, shapes, strict=True)]


def _difference(tensor: Tensor, exported: np.ndarray) -> float:
    largest = float(np.abs(tensor.numpy().astype(np.float64) - exported.astype(np.float64)).max())
    return math.inf if math.isnan(largest) else largest
