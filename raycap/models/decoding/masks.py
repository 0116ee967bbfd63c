"""The dropout masks of sampled captions: one set for the cached steps that sample captions and for the pass that scores
these captions.

The gradient of the scoring pass is then that of the sampling itself. The n-th dropout of a step is the n-th dropout of
the pass. A caption's mask at a position is drawn once, as in the Meshed-Memory Transformer's code, which caches its
steps. Code without a cache, as ExpansionNet v2's, computes the earlier positions anew in each step, with new masks.

A beam that continues another one takes over its masks at the positions so far.

`CaptionMasks` is for decoders whose step computes one token, `PrefixMasks` for those whose step computes all tokens.

Shapes: B images, K captions per image, R = B*K rows, T positions, N further dimensions of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raycap.models.encoder_decoder import EncoderDecoder
from raycap.models.layers import Dropout, keep_mask


class CaptionMasks:
    """Masks for `rows` captions of up to `length` input tokens, drawn by torch's default generator."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.length = length
        self.rows = torch.arange(rows, device=device)  # of the images that remain in sampling
        self.sources = self.rows[:, None].repeat(1, length)  # (R, T), by caption and position: the row of its mask
        self.drawn: list[Tensor] = []  # of each dropout: (T, R, N) for tokens, (T, T, R, N) for pairs of tokens
        self.calls = 0  # dropouts so far in this step or pass
        self.position: int | None = None  # of the step; None in a pass

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """In a `with` block, the decoder of `model` has these masks. Its encoder must not run there."""
        modules = [module for module in model.modules() if isinstance(module, Dropout | EncoderDecoder)]
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
        """A teacher-forced pass over captions with `length` input tokens; it ends the sampling."""
        self.calls, self.position = 0, None
        self.sources = self.sources[:, :length]

    def select(self, index: Tensor) -> None:
        """After a step: remaining row r continues the former remaining row index[r], as in `Cache.select`."""
        assert self.position is not None
        past = slice(0, self.position + 1)
        self.sources[self.rows, past] = self.sources[self.rows[index], past]

    def reorder(self, order: Tensor) -> None:
        """After a search: caption k of image b is the former one order[b, k]."""
        images, beams = order.shape
        first = torch.arange(0, images * beams, beams, device=order.device)
        self.sources = self.sources[(first[:, None] + order).flatten()]

    def keep_images(self, index: Tensor, beams: int) -> None:
        """Only the images with these indices among the remaining ones remain in sampling."""
        self.rows = self.rows.view(-1, beams)[index].flatten()

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        """The next dropout's mask: (R, T, *shape) in a pass, (R, 1, *shape) of the remaining rows in a step."""
        mask = self._next((self.length,), shape, p)
        if self.position is not None:
            return mask[self.position, self.rows][:, None]
        return mask[torch.arange(self.sources.shape[1], device=mask.device), self.sources]

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        """The next dropout's mask for pairs of tokens.

        (R, T, T, *shape) in a pass. In a step, which is the later token of its pairs, (2, R, t, *shape): the pairs with
        the tokens so far as the second token, and as the first one. Both contain the pair of the new token with itself.
        """
        mask = self._next((self.length, self.length), shape, p)
        if self.position is not None:
            past = slice(0, self.position + 1)
            parts = mask[self.position, past], mask[past, self.position]
            return torch.stack([part[:, self.rows] for part in parts]).transpose(1, 2)
        tokens = torch.arange(self.sources.shape[1], device=mask.device)
        later = torch.maximum(tokens[:, None], tokens)  # a pair is first computed in the step of its later token
        return mask[tokens[:, None], tokens, self.sources[:, later]]

    def _next(self, positions: tuple[int, ...], shape: tuple[int, ...], p: float) -> Tensor:
        return self._get_or_draw((*positions, len(self.sources), *shape), p)

    def _get_or_draw(self, expected: tuple[int, ...], p: float) -> Tensor:
        """The next dropout's masks, of the shape `expected`."""
        if self.calls == len(self.drawn):
            self.drawn.append(keep_mask(expected, p, self.sources.device))
        mask = self.drawn[self.calls]
        assert mask.shape == expected, f"dropout {self.calls} has masks of {tuple(mask.shape)}, needs {expected}"
        self.calls += 1
        return mask


class PrefixMasks(CaptionMasks):
    """Masks for a decoder whose step computes all tokens so far and a mask token (`models/clustformer.py`).

    Every step has masks of its own for all its tokens, so that a step's masks come from one row. The pass has T rows of
    T + 1 tokens per caption, one per step, and T + 1 times as many masks as with `CaptionMasks`.
    """

    def of_tokens(self, shape: tuple[int, ...], p: float) -> Tensor:
        """The next dropout's mask: (R*T, T + 1, *shape) in a pass, (R, t + 1, *shape) after t tokens in a step."""
        return self._of_prefixes(1, shape, p)

    def of_pairs(self, shape: tuple[int, ...], p: float) -> Tensor:
        """As `of_tokens`, for pairs of tokens: (R*T, T + 1, T + 1, *shape) or (R, t + 1, t + 1, *shape)."""
        return self._of_prefixes(2, shape, p)

    def _of_prefixes(self, dims: int, shape: tuple[int, ...], p: float) -> Tensor:
        """The next dropout's mask with `dims` dimensions of tokens."""
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
    """Masks for captions of `model`, as `CaptionMasks`."""
    kind = PrefixMasks if isinstance(model, EncoderDecoder) and model.steps_compute_prefix else CaptionMasks
    return kind(rows, length, device)
