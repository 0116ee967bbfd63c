"""The interface through which other code trains, decodes and stores captioning models.

Shapes in this package: B images, N image tokens, C feature width, D model width, K captions (or beams) per image,
T caption tokens, V vocabulary, E expanded vectors, H heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from raycap.models.config import ModelConfig, ModelSizes
from raycap.models.decoding.cache import TreeCache


@dataclass(frozen=True)
class Features:
    """A captioner's input for B images."""

    tokens: Tensor  # features (B, N, C), or normalized pixels (B, 3, H, W) if the captioner has a backbone
    lengths: Tensor | None = None  # (B,), the number of valid tokens of each image; None if all N are valid
    boxes: Tensor | None = None  # (B, N, 4), corners x0 y0 x1 y1 of regions, for the models that need them


@dataclass(frozen=True)
class Memory:
    """The encoder's output, which the decoder reads, with the lengths of `Features`."""

    states: Tensor  # (B, N, D), or (B, levels, N, D) if the decoder attends to several encoder levels
    lengths: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.states.shape[0]


Tensors = TypeVar("Tensors", Features, Memory)


def map_tensors(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    """Returns a copy of the dataclass with `change` applied to every tensor. Fields that are None stay None."""
    return replace(tensors, **{name: change(tensor) for name, tensor in vars(tensors).items() if tensor is not None})


class CaptionModel(nn.Module, ABC):
    """A captioner that reads features. The weights and inputs decide the dtype, and callers decide about autocast."""

    def __init__(self, config: ModelConfig, sizes: ModelSizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes

    @abstractmethod
    def init_weights(self) -> None:
        """Draws the weights anew with torch's default generator, as the system's reference or paper does."""

    @abstractmethod
    def encode(self, features: Features) -> Memory:
        """Encodes features (B, N, C). Raises ValueError if their width is wrong, or if boxes are needed and missing."""

    @abstractmethod
    def decode(self, memory: Memory, tokens: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Returns teacher-forced logits (B*K, T, V) for tokens (B*K, T), which begin with SOS.

        positions: (P,), indices into the B*K*T positions of all rows. If they are given, only the logits (P, V) at
        these positions are computed. This saves the logits at padding, which can be half of all positions.

        Row b*K+k is caption k of image b. The logits at position t depend on the tokens up to t. PAD may occur only
        after a caption's end, and the logits at PAD have no meaning. Raises ValueError for a caption longer than the
        positional table.
        """

    def predicting(self, values: Tensor) -> Tensor:
        """Selects the positions that predict a word: (rows, positions, ...) -> (B*K, T, ...).

        values: one for each position in a decoder layer. Most decoders predict a word at every position, so the values
        are returned as they are.
        """
        return values

    def forward(self, features: Features, tokens: Tensor) -> Tensor:
        """Returns `decode(encode(features), tokens)`. Each image is encoded once for all of its captions."""
        return self.decode(self.encode(features), tokens)

    def paper_macs(self, image_tokens: int, caption_tokens: float) -> float | None:
        """Returns the paper's count of multiply-accumulates for one image and one caption, or None if it has none."""
        return None

    @abstractmethod
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        """Returns an empty cache with `beams` rows per image."""

    @abstractmethod
    def step(self, tokens: Tensor, cache: TreeCache) -> tuple[Tensor, TreeCache]:
        """Reads one token (B*K,) per row. Returns the logits (B*K, V) of the next word, and the cache with the token.

        The logits have no gradient.
        """


def check_positions(length: int, max_positions: int) -> None:
    """Raises ValueError if a caption of `length` input tokens is longer than the positional table."""
    if length > max_positions:
        raise ValueError(
            f"a caption of {length} input tokens is longer than the positional table of {max_positions} rows; "
            f"cut the captions, or build the model with max_positions of {length} or more"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode within the context, and back into its former mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def valid_tokens(lengths: Tensor | None, count: int) -> Tensor | None:
    """Returns a mask (B, N) that is True at valid image tokens and False at padding, or None without `lengths`."""
    if lengths is None:
        return None
    return torch.arange(count, device=lengths.device) < lengths[:, None]
