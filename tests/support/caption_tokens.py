"""The tokens of a data set's captions: as training reads them, and in a plain form with Python lists."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.language.tokenizers import text_column
from raycap.pipeline.data.vocabulary import TokenFiles, Vocabulary, write_tokens
from raycap.pipeline.training.batches import CaptionTokens


def open_tokens(by_image: list[list[list[int]]]) -> TokenFiles:
    """The token files of lists of ids, by image and caption. Their memory maps outlive the folder."""
    with TemporaryDirectory() as folder:
        write_tokens(Path(folder), by_image)
        return TokenFiles.open(Path(folder))


def caption_tokens(dataset: Dataset, vocabulary: Vocabulary) -> CaptionTokens:
    """The captions of a data set without a run."""
    by_image = [
        [vocabulary.encode(vocabulary.tokenize(caption)) for caption in captions]
        for captions in dataset.column(text_column(vocabulary.tokenizer))
    ]
    return CaptionTokens(open_tokens(by_image), np.arange(len(by_image)), vocabulary.pad)


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
