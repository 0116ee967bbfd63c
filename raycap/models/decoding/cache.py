"""The decoder's cache between steps: a tree of slots that the beams of an image share.

A slot has the cached tensors of one token. Each step adds one slot per beam. The tokens of a beam are a path of slots,
whose numbers are in `ancestors`. When a search replaces beams, only this small table of numbers is reordered, and no
slot is copied. Products are computed for all slots of an image. Each beam then picks the results of the slots on its
path.

Shapes: B images, K beams, t steps so far. Slots are numbered step by step, and within a step beam by beam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raycap.models.dropout import CaptionMasks

INITIAL_STEPS = 20  # enough for most captions; the room is doubled for longer ones


class TreeSlots:
    """The cached tensors of one layer, (G, B, slots, ...), where G is the number of tensors cached together."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.count = 0  # number of slots so far, including those of the current step
        self.cached: dict[str, Tensor] = {}

    def allocate(
        self, name: str, shape: tuple[int, ...], like: Tensor, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns a view of the current step's slots for the caller to fill, and a view of all slots.

        The views are (G, B, K, ...), which is `shape`, and (G, B, slots, ...), with dtype and device of `like`. If
        `length` is given, both views have a last dimension of this size for the positions up to the current step, and a
        slot is 0 at the positions after its own step.
        """
        cached = self.cached.get(name)
        if cached is None or self._is_full(cached, length):
            cached = self.cached[name] = self._grown(cached, shape, like, length)
        used = cached[:, :, : self.count]
        if length is not None:
            used = used[..., :length]
        return used[:, :, -self.beams :], used

    def append(self, name: str, new: Tensor) -> Tensor:
        """Writes `new` (G, B, K, ...) into the current step's slots. Returns all slots (G, B, slots, ...)."""
        new_slots, all_slots = self.allocate(name, tuple(new.shape), new)
        new_slots.copy_(new)
        return all_slots

    def _is_full(self, cached: Tensor, length: int | None) -> bool:
        """Returns True if the tensor has too few slots, or fewer than `length` positions."""
        return cached.shape[2] < self.count or (length is not None and cached.shape[-1] < length)

    def _grown(self, old: Tensor | None, shape: tuple[int, ...], like: Tensor, length: int | None) -> Tensor:
        """Returns a larger tensor that begins with the content of `old`. The size doubles, so that copies are rare."""
        steps = INITIAL_STEPS
        while steps * self.beams < self.count or steps < (length or 0):
            steps *= 2
        new_shape = [*shape[:2], steps * self.beams, *shape[3:]]
        grown = like.new_empty(new_shape) if length is None else like.new_zeros([*new_shape, steps])
        if old is not None:
            grown[tuple(slice(0, size) for size in old.shape)] = old
        return grown

    def keep_images(self, index: Tensor) -> None:
        """Keeps only the images with the indices `index` (int64)."""
        self.cached = {name: cached.index_select(1, index) for name, cached in self.cached.items()}


class RowSlots(TreeSlots):
    """The slots of one layer for R captions that share no slots: R "images" with one beam each.

    Every step makes new tensors instead of writing into old ones, so that a step can be exported as a graph that maps
    tensors to tensors. cached: the slots of earlier steps, or {} before the first step.
    """

    def __init__(self, cached: dict[str, Tensor]) -> None:
        super().__init__(beams=1)
        self.cached = cached

    def append(self, name: str, new: Tensor) -> Tensor:
        """Does what `TreeSlots.append` does, for new (1, R, 1, ...)."""
        return self.append_rows(name, new[0, :, 0])[None]

    def append_rows(self, name: str, new: Tensor) -> Tensor:
        """Adds a slot `new` (R, ...) to each row. Returns all slots (R, slots, ...), the new one last."""
        old = self.cached.get(name)
        self.cached[name] = new[:, None] if old is None else torch.cat((old, new[:, None]), 1)
        return self.cached[name]

    def append_by_position(self, name: str, new: Tensor) -> Tensor:
        """Does what `append_rows` does, for `new` (R, ..., slots) with a value for each position.

        Older slots get the value 0 at the new position.
        """
        old = self.cached.get(name)
        if old is not None:
            self.cached[name] = F.pad(old, (0, 1))
        return self.append_rows(name, new)


def _select_images(x: Tensor, index: Tensor) -> Tensor:
    """Returns x (B, ...) for the images in `index`. The memory layout stays: a transposed tensor remains transposed."""
    return x.index_select(0, index) if x.is_contiguous() else x.mT.index_select(0, index).mT


@dataclass
class TreeCache:
    """The decoder's state between steps for B images with K beams each. Row b*K+k is beam k of image b.

    The state has the slots and the cross-attention keys and values of every layer, and the beams' paths.
    """

    images: int
    beams: int
    cross: list[tuple[Tensor, Tensor]]  # keys and values of each layer, (B, H, N, D / H)
    bias: Tensor | None  # (B, 1, 1, N), 0 at image tokens and -1e4 at padding, or None if nothing is padded
    layers: list[TreeSlots]
    ancestors: Tensor  # (B, K, t), the slots on each beam's path
    length: int = 0  # number of tokens that each beam has read
    count: int = 0  # number of slots so far
    masks: CaptionMasks | None = None  # dropout masks that the teacher-forced pass uses, too

    def advance(self) -> None:
        """Begins a step: adds a new slot to the path of each beam."""
        if self.masks is not None:
            self.masks.begin_step(self.length)
        new_slots = torch.arange(self.count, self.count + self.beams, device=self.ancestors.device)
        self.ancestors = torch.cat((self.ancestors, new_slots.view(1, -1, 1).expand(self.images, -1, -1)), 2)
        self.length += 1
        self.count += self.beams
        for layer in self.layers:
            layer.count = self.count

    def expand_beams(self, beams: int) -> TreeCache:
        """Replaces each image's only beam by `beams` copies, in place."""
        self.ancestors = self.ancestors.expand(-1, beams, -1)
        self.beams = beams
        for layer in self.layers:
            layer.beams = beams
        return self

    def select(self, index: Tensor) -> TreeCache:
        """Makes row r continue the beam that was in row index[r], of the same image. index: (B*K,) int64."""
        if self.masks is not None:
            self.masks.select(index)
        self.ancestors = self.ancestors.flatten(0, 1).index_select(0, index).view(self.images, self.beams, -1)
        return self

    def keep_images(self, index: Tensor) -> TreeCache:
        """Keeps only the images with the indices `index` (int64), because the captions of the others are finished."""
        if self.masks is not None:
            self.masks.keep_images(index, self.beams)
        self.images = len(index)
        self.ancestors = self.ancestors.index_select(0, index)
        self.cross = [(_select_images(key, index), _select_images(value, index)) for key, value in self.cross]
        self.bias = None if self.bias is None else self.bias.index_select(0, index)
        for layer in self.layers:
            layer.keep_images(index)
        return self
