"""Dropout, and masks that SCST uses twice: when it samples captions, and when it computes their loss.

Sampling decodes a caption step by step, and the loss comes from one teacher-forced pass over the whole caption. The
gradient of the pass is right for the sampled captions only if both drop the same elements. The n-th dropout of a step
and the n-th dropout of the pass therefore use the same masks.

A caption's mask at a position is drawn once, as in the Meshed-Memory Transformer's code. (ExpansionNet v2's code has no
cache, so it draws new masks for all positions in each step.) A beam that continues another beam takes over its masks.

Shapes: B images, K captions per image, R = B*K rows, T positions, N further dimensions of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Masked(torch.autograd.Function):
    """Computes x * mask * scale, and keeps only the mask, whose elements are bytes, for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaled(x, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return _scaled(gradients[0], mask, ctx.scale), None, None


def _scaled(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Computes x * mask * scale in one pass over memory."""
    factor = mask.to(x.dtype)  # a product with a uint8 or bool tensor would not be vectorized
    return torch.addcmul(x.new_zeros(()), x, factor, value=scale, out=factor)


def _dropped_bytes(p: float) -> int:
    """Returns how many of the 256 values of a random byte mean "dropped" on the CPU: 256 p, rounded."""
    return min(max(round(256 * p), 1), 255)


def keep_mask(shape: Sequence[int], p: float, device: torch.device) -> Tensor:
    """Draws a uint8 mask by torch's default generator: 0 with probability p (rounded on a CPU, see `dropout`) or 1."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - p)
    count = math.prod(shape)
    # 64-bit words are drawn, because each gives the bytes of eight elements at once
    words = torch.empty((count + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    # random bytes below the threshold become 0 (dropped), all others 1
    return words.view(torch.uint8)[:count].view(shape).ge_(_dropped_bytes(p))


def masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Applies dropout to x with a mask of its shape that `keep_mask` has drawn with the same p."""
    share = p if x.device.type != "cpu" else _dropped_bytes(p) / 256
    return _Masked.apply(x, mask, 1 / (1 - share))


def dropout(x: Tensor, p: float) -> Tensor:
    """Applies dropout. On a CPU, masks come from random bytes, about eight times faster than Bernoulli numbers.

    With bytes, p is rounded to a multiple of 1/256, at least 1/256 (0.3 becomes 77/256 = 0.3008, 0.1 becomes 26/256).
    The remaining elements are scaled by the rounded probability, so that the expectation is exact. The mask is saved
    for the gradient as bytes, which take a quarter of the memory of torch's mask.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():  # the compiler makes F.dropout part of other kernels
        return F.dropout(x, p)
    return masked(x, keep_mask(x.shape, p, x.device), p)


class Dropout(nn.Module):
    """Dropout whose masks may be shared, and whose probability `set_dropout` can change unless it is `fixed`."""

    def __init__(self, p: float, fixed: bool = False) -> None:
        super().__init__()
        self.p = p
        self.fixed = fixed
        self.masks: CaptionMasks | None = None

    @property
    def active(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, shared: Callable[[CaptionMasks, float], Tensor] | None = None) -> Tensor:
        """Applies dropout to x.

        shared: takes the mask of x, in its order of elements, from shared masks. Without `shared`, x is (R, ..., T, D)
        in a pass, and (R, ..., 1, D) or (R, D) in a step.
        """
        if not self.active:
            return x
        if self.masks is None:
            return dropout(x, self.p)
        return self._with_shared_mask(x, shared)

    @torch.compiler.disable  # compiled code would not count these calls, and the masks are found by their number
    def _with_shared_mask(self, x: Tensor, shared: Callable[[CaptionMasks, float], Tensor] | None) -> Tensor:
        assert self.masks is not None
        if shared is None:
            mask = self.masks.of_tokens((*x.shape[1:-2], x.shape[-1]), self.p).movedim(1, -2)
        else:
            mask = shared(self.masks, self.p)
        return masked(x, mask.reshape(x.shape), self.p)


def set_dropout(module: nn.Module, p: float) -> None:
    """Sets the probability of all dropouts in `module`, except fixed ones."""
    for child in module.modules():
        if isinstance(child, Dropout) and not child.fixed:
            child.p = p


class CaptionMasks:
    """Dropout masks for `rows` captions of up to `length` input tokens, drawn by torch's default generator."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.length = length
        self.rows = torch.arange(rows, device=device)  # the rows of images that are still sampled
        self.sources = self.rows[:, None].repeat(1, length)  # (R, T): the row whose masks a caption uses at a position
        # The masks of each dropout: (T, R, N) if it drops elements of tokens, (T, T, R, N) for pairs of tokens.
        self.drawn: list[Tensor] = []
        self.calls = 0  # the number of dropouts so far in this step or pass
        self.position: int | None = None  # the position of the current step, or None in a pass

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """Makes the decoder of `model` use these masks within the context, in which the encoder must not run."""
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "masks")]
        for module in modules:
            module.masks = self
        try:
            yield
        finally:
            for module in modules:
                module.masks = None

    def begin_step(self, position: int) -> None:
        self.calls, self.position = 0, position

    def begin_pass(self, length: int) -> None:
        """Ends the sampling, and begins a teacher-forced pass over captions of `length` input tokens."""
        self.calls, self.position = 0, None
        self.sources = self.sources[:, :length]

    def select(self, index: Tensor) -> None:
        """Makes row r continue the former row index[r] after a step, as `TreeCache.select` does.

        Indices count only the rows of images that are still sampled.
        """
        assert self.position is not None
        past = slice(0, self.position + 1)
        self.sources[self.rows, past] = self.sources[self.rows[index], past]

    def reorder(self, order: Tensor) -> None:
        """Moves the caption at place order[b, k] of image b to place k, after a search has ranked the captions."""
        images, beams = order.shape
        first = torch.arange(0, images * beams, beams, device=order.device)
        self.sources = self.sources[(first[:, None] + order).flatten()]

    def keep_images(self, index: Tensor, beams: int) -> None:
        """Ends the sampling of all images outside of `index`. Indices count only images that are still sampled."""
        self.rows = self.rows.view(-1, beams)[index].flatten()

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Returns the next dropout's mask: (R, T, *shape) in a pass, or (R, 1, *shape) for the rows of a step."""
        mask = self._get_or_draw((self.length, len(self.sources), *shape), p)
        if self.position is not None:
            return mask[self.position, self.rows][:, None]
        positions = torch.arange(self.sources.shape[1], device=mask.device)
        return mask[positions, self.sources]

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Returns the next dropout's mask for pairs of tokens, (R, T, T, *shape) in a pass.

        A step gets (2, R, t, *shape): first for pairs that begin with the new token, then for pairs that end with it.
        """
        mask = self._get_or_draw((self.length, self.length, len(self.sources), *shape), p)
        if self.position is not None:
            past = slice(0, self.position + 1)
            parts = mask[self.position, past], mask[past, self.position]
            return torch.stack([part[:, self.rows] for part in parts]).transpose(1, 2)
        positions = torch.arange(self.sources.shape[1], device=mask.device)
        # the later token's row has the mask of a pair, because the step of this token computes the pair first
        later = torch.maximum(positions[:, None], positions)
        owner = self.sources[:, later]  # (R, T, T)
        return mask[positions[:, None], positions, owner]

    def _get_or_draw(self, expected: tuple[int, ...], p: float) -> Tensor:
        """Returns the next dropout's masks, which have the shape `expected`. Draws them if they are new."""
        if self.calls == len(self.drawn):
            self.drawn.append(keep_mask(expected, p, self.sources.device))
        mask = self.drawn[self.calls]
        assert mask.shape == expected, f"dropout {self.calls} has masks of {tuple(mask.shape)}, needs {expected}"
        self.calls += 1
        return mask


class PrefixMasks(CaptionMasks):
    """Masks for a decoder whose step computes all tokens so far and a mask token (`models/clustformer.py`).

    Every step has new masks for all of its tokens. A teacher-forced pass has one row of T + 1 tokens for each of the T
    steps of a caption.
    """

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Returns the next dropout's mask: (R*T, T + 1, *shape) in a pass, (R, t + 1, *shape) in step t."""
        return self._of_prefixes(1, shape, p)

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Does what `of_tokens` does for pairs of tokens: (R*T, T + 1, T + 1, *shape) or (R, t + 1, t + 1, *shape)."""
        return self._of_prefixes(2, shape, p)

    def _of_prefixes(self, dims: int, shape: tuple[int, ...], p: float) -> Tensor:
        """Returns the next dropout's mask, in which `dims` dimensions count tokens."""
        tokens = (self.length + 1,) * dims
        mask = self._get_or_draw((self.length, len(self.sources), *tokens, *shape), p)
        if self.position is not None:
            steps, num_tokens = mask[self.position, self.rows], self.position + 2
        else:
            num_steps = self.sources.shape[1]
            steps = mask[torch.arange(num_steps, device=mask.device), self.sources].flatten(0, 1)
            num_tokens = num_steps + 1
        return steps[:, :num_tokens] if dims == 1 else steps[:, :num_tokens, :num_tokens]


def new_masks(model: nn.Module, rows: int, length: int, device: torch.device) -> CaptionMasks:
    """Makes masks of the kind that the decoder of `model` needs. Arguments are as in `CaptionMasks`."""
    kind = PrefixMasks if getattr(model, "steps_compute_prefix", False) else CaptionMasks
    return kind(rows, length, device)
