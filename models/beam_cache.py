"""The decoder's memory between steps: a tree of slots that the beams of an image share.

Each step adds one slot per beam. A beam is the path of its slots (`ancestors`), so that choosing beams reorders a small
table of integers and copies no slot. Products run over all slots of an image,
which its beams share anyway, and each beam then picks the results of its own path.

Shapes: B images, K beams, t steps so far. Slots are numbered as they were made, those of one step beam by beam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import Cache

FIRST_CAPACITY = 20  # steps, enough for most captions; doubled when they are not


class TreeSlots:
    """The cached tensors of one layer, (G, B, slots, ...) with any leading G."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.count = 0  # slots so far, those of the step in progress included
        self.cached: dict[str, Tensor] = {}

    def allocate(
        self, name: str, shape: tuple[int, ...], like: Tensor, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Where the step in progress writes, and all slots with it: (G, B, K, ...) and (G, B, slots, ...).

        shape (G, B, K, ...). length: a last dimension more, of the positions in a slot's own past, this many so far;
        beyond a slot's own it holds 0.
        """
        cached = self.cached.get(name)
        if cached is None or cached.shape[2] < self.count or (length is not None and cached.shape[-1] < length):
            cached = self.cached[name] = self._grown(cached, shape, like, length)
        used = cached[:, :, : self.count]
        if length is not None:
            used = used[..., :length]
        return used[:, :, -self.beams :], used

    def append(self, name: str, new: Tensor) -> Tensor:
        """Writes new (G, B, K, ...) as the slots of the step in progress; returns all, (G, B, slots, ...)."""
        place, used = self.allocate(name, tuple(new.shape), new)
        place.copy_(new)
        return used

    def _grown(self, old: Tensor | None, shape: tuple[int, ...], like: Tensor, length: int | None) -> Tensor:
        whole = [*shape[:2], _capacity(self.count, self.beams), *shape[3:]]
        grown = like.new_empty(whole) if length is None else like.new_zeros([*whole, _capacity(length, 1)])
        if old is not None:
            grown[tuple(slice(0, size) for size in old.shape)] = old
        return grown

    def keep_images(self, index: Tensor) -> None:
        self.cached = {name: cached.index_select(1, index) for name, cached in self.cached.items()}


def _capacity(needed: int, a_step: int) -> int:
    """Room for at least `needed` entries that come `a_step` at a time; doubled rather than grown each time."""
    steps = FIRST_CAPACITY
    while steps * a_step < needed:
        steps *= 2
    return steps * a_step


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """x (B, ...) of the images in `index`, laid out as it was: a transposed one as a transposed one."""
    return x.index_select(0, index) if x.is_contiguous() else x.mT.index_select(0, index).mT


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
    count: int = 0  # slots so far

    def advance(self) -> None:
        """Adds this step's slot to each path."""
        new_slots = torch.arange(self.count, self.count + self.beams, device=self.ancestors.device)
        self.ancestors = torch.cat((self.ancestors, new_slots.view(1, -1, 1).expand(self.images, -1, -1)), 2)
        self.length += 1
        self.count += self.beams
        for layer in self.layers:
            layer.count = self.count

    def expand_beams(self, beams: int) -> TreeCache:
        if self.beams != 1:
            raise ValueError(f"each image has {self.beams} beams already; only one can become {beams}")
        self.ancestors = self.ancestors.expand(-1, beams, -1)
        self.beams = beams
        for layer in self.layers:
            layer.beams = beams
        return self

    def select(self, index: Tensor) -> TreeCache:
        self.ancestors = self.ancestors.flatten(0, 1).index_select(0, index).view(self.images, self.beams, -1)
        return self

    def keep_images(self, index: Tensor) -> TreeCache:
        self.images = len(index)
        self.ancestors = self.ancestors.index_select(0, index)
        self.cross = [(_chosen(key, index), _chosen(value, index)) for key, value in self.cross]
        self.bias = None if self.bias is None else self.bias.index_select(0, index)
        for layer in self.layers:
            layer.keep_images(index)
        return self
