"""The decoder's memory between steps: a tree of slots that the beams of an image share.

Each step adds one slot a beam. A beam is the path of slots it came through (`ancestors`), so that choosing beams
reorders a small table of integers and copies nothing of what a slot holds. Products run over all slots of an image,
which its beams share anyway, and each beam then picks the results of its own path.

Shapes: B images, K beams, t steps so far; slot s*K+k was made by beam k in step s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import Cache

FIRST_CAPACITY = 20  # steps, enough for most captions; doubled when it is not


class TreeSlots:
    """What one layer keeps of each token: tensors (G, B, slots, ...) with any leading G."""

    def __init__(self, images: int, beams: int) -> None:
        self.images = images
        self.beams = beams
        self.kept: dict[str, Tensor] = {}
        self.weights: dict[str, tuple[Tensor, ...]] = {}

    def put(self, name: str, new: Tensor, step: int, squared: bool = False) -> Tensor:
        """Writes new (G, B, K, ...) into the slots of `step` (from 0); returns the slots so far (G, B, slots, ...).

        squared: the last dimension counts the positions of a slot's own past, step + 1 of them; beyond it holds 0.
        """
        kept = self.kept.get(name)
        if kept is None or kept.shape[2] <= step * self.beams:
            kept = self.kept[name] = self._grown(kept, new, squared)
        used = (step + 1) * self.beams
        place = kept[:, :, used - self.beams : used]
        if not squared:
            place.copy_(new)
            return kept[:, :, :used]
        place[..., : step + 1].copy_(new)
        return kept[:, :, :used, ..., : step + 1]

    def once(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What depends on the layer alone, made at the first step."""
        if name not in self.weights:
            self.weights[name] = make()
        return self.weights[name]

    def _grown(self, old: Tensor | None, new: Tensor, squared: bool) -> Tensor:
        capacity = FIRST_CAPACITY if old is None else 2 * old.shape[2] // self.beams
        shape = [*new.shape[:2], capacity * self.beams, *new.shape[3:]]
        if squared:
            shape[-1] = capacity
        grown = new.new_zeros(shape) if squared else new.new_empty(shape)
        if old is not None:
            grown[tuple(slice(0, size) for size in old.shape)] = old
        return grown

    def keep_images(self, index: Tensor) -> None:
        self.images = len(index)
        self.kept = {name: kept.index_select(1, index) for name, kept in self.kept.items()}


@dataclass
class TreeCache(Cache):
    """Slots of every layer, the cross-attention keys and values of every layer, and the beams' paths."""

    images: int
    beams: int
    cross: list[tuple[Tensor, Tensor]]  # of each layer, (B, H, N, D / H) both
    bias: Tensor | None  # (B, 1, 1, N), -1e4 at padded image tokens
    layers: list[TreeSlots]
    ancestors: Tensor  # (B, K, t)
    length: int = 0

    def advance(self) -> Tensor:
        """Adds this step's slot to each path; the paths (B, K, t)."""
        own = torch.arange(self.length * self.beams, (self.length + 1) * self.beams, device=self.ancestors.device)
        self.ancestors = torch.cat((self.ancestors, own.view(1, -1, 1).expand(self.images, -1, -1)), 2)
        self.length += 1
        return self.ancestors

    def select(self, index: Tensor) -> TreeCache:
        self.ancestors = self.ancestors.flatten(0, 1).index_select(0, index).view_as(self.ancestors)
        return self

    def keep_images(self, index: Tensor) -> TreeCache:
        self.images = len(index)
        self.ancestors = self.ancestors.index_select(0, index)
        self.cross = [(key.index_select(0, index), value.index_select(0, index)) for key, value in self.cross]
        self.bias = None if self.bias is None else self.bias.index_select(0, index)
        for layer in self.layers:
            layer.keep_images(index)
        return self
