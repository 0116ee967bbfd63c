"""The interface of captioning models, through which other code trains, decodes and stores them.

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


@dataclass(frozen=True)
class Features:
    """A captioner's input for B images."""

    tokens: Tensor  # features (B, N, C); for a captioner with a backbone also normalized pixels (B, 3, H, W)
    lengths: Tensor | None = None  # the number (B,) of each image's valid tokens; None if all N are valid
    boxes: Tensor | None = None  # corners x0 y0 x1 y1 of regions, (B, N, 4); only some models need them

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, rows: Tensor) -> Features:
        """The features of the images with the indices `rows` (int64, in any number and order)."""
        return map_tensors(self, lambda tensor: tensor.index_select(0, rows))


@dataclass(frozen=True)
class Memory:
    """The encoder's output for the decoder, with the lengths and boxes of `Features`."""

    states: Tensor  # (B, N, D), or (B, levels, N, D) where the decoder attends to every encoder level
    lengths: Tensor | None = None
    boxes: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.states.shape[0]

    def select(self, index: Tensor) -> Memory:
        """The memory of the images with the indices `index` (int64, in any number and order)."""
        return map_tensors(self, lambda tensor: tensor.index_select(0, index))


Tensors = TypeVar("Tensors", Features, Memory)


def map_tensors(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    """The same dataclass with every tensor changed; fields that are None stay None."""
    return replace(tensors, **{name: change(tensor) for name, tensor in vars(tensors).items() if tensor is not None})


class Cache(ABC):
    """The decoder's state between steps for B images with K beams each. Row b*K+k is beam k of image b."""

    length: int  # tokens consumed so far
    images: int
    beams: int

    @abstractmethod
    def expand_beams(self, beams: int) -> Cache:
        """Replaces the single beam of each image by `beams` copies in this cache. ValueError for more than one beam."""

    @abstractmethod
    def select(self, index: Tensor) -> Cache:
        """Lets row r of this cache continue the former row index[r] of the same image. index is (B*K,) int64."""

    @abstractmethod
    def keep_images(self, index: Tensor) -> Cache:
        """Drops all images whose indices are not in `index` (int64), because their captions are finished."""


class CaptionModel(nn.Module, ABC):
    """A captioner that reads features. Devices and dtypes are those of the tensors; callers decide about autocast."""

    def __init__(self, config: ModelConfig, sizes: ModelSizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes

    @abstractmethod
    def init_weights(self) -> None:
        """Draws the weights anew, as the system's reference or paper draws them (torch's default generator)."""

    @abstractmethod
    def encode(self, features: Features) -> Memory:
        """Encodes features (B, N, C). Raises ValueError for another feature width, and for boxes that are missing."""

    @abstractmethod
    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """Teacher-forced logits (B*K, T, V) for tokens (B*K, T) with SOS; row b*K+k is caption k of image b.

        Position t depends on the tokens up to t. PAD may occur only after a caption's end; logits there mean nothing.
        Raises ValueError for a caption longer than the positional table.
        """

    def predicting(self, values: Tensor) -> Tensor:
        """Selects from the values (rows, positions, ...) at a decoder layer's input those that predict a word.

        The result is (B*K, T, ...). Most decoders predict a word at every position.
        """
        return values

    def forward(self, features: Features, tokens: Tensor) -> Tensor:
        """`decode(encode(features), tokens)`: each image is encoded once for all of its captions."""
        return self.decode(self.encode(features), tokens)

    def paper_macs(self, image_tokens: int, caption_tokens: float) -> float | None:
        """Multiply-accumulates of an image and one caption as the paper counts them. None if the paper has no count."""
        return None

    @abstractmethod
    def init_cache(self, memory: Memory, beams: int) -> Cache:
        """An empty cache for `beams` rows per image."""

    @abstractmethod
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Logits (B*K, V) after one more token (B*K,) per row, and the cache with it. Logits have no gradient."""


def check_positions(length: int, max_positions: int) -> None:
    """Raises ValueError for a caption longer than the positional table."""
    if length > max_positions:
        raise ValueError(
            f"a caption of {length} input tokens is longer than the positional table of {max_positions} rows; "
            f"cut the captions, or build the model with max_positions of {length} or more"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the context the model is in evaluation mode. Afterwards it has its former mode again."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def hooked(modules: list[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """Within the context, each of `modules` calls `hook` with itself and its inputs before it runs."""
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def valid_tokens(lengths: Tensor | None, count: int) -> Tensor | None:
    """A mask (B, N) that is True where an image token is valid (not padding); None when all tokens are valid."""
    if lengths is None:
        return None
    return torch.arange(count, device=lengths.device) < lengths[:, None]
