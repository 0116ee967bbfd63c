"""The tokens of captions in a plain form with Python lists."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class PlainCaptionTokens:
    """`CaptionTokens` of lists of ids, by image and caption, in flat arrays."""

    def __init__(self, by_image: list[list[list[int]]], pad: int) -> None:
        rows = [caption for captions in by_image for caption in captions]
        self.ids = np.fromiter(chain.from_iterable(rows), np.int32)
        self.offsets = np.cumsum([0, *map(len, rows)])
        self.first = np.cumsum([0, *map(len, by_image)])
        self.image_of = np.repeat(np.arange(len(by_image)), np.diff(self.first))
        self.pad = pad

    def padded(self, captions: np.ndarray) -> Tensor:
        starts, ends = self.offsets[captions], self.offsets[captions + 1]
        rows = [torch.from_numpy(self.ids[start:end]) for start, end in zip(starts, ends, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=self.pad).long()

    def target_counts(self, captions: np.ndarray) -> np.ndarray:
        return self.offsets[captions + 1] - self.offsets[captions] - 1
