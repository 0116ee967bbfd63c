"""The raw reference captions of images, which are read in parts. This module does not import pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from raycap.pipeline.data.language.tokenizers import text_column

if TYPE_CHECKING:
    from raycap.pipeline.data.dataset import Dataset

_BATCH = 1024  # images whose captions are Python lists at a time


class References:
    """The captions of each image. An image is numbered by its position, and the image ids only serve to look it up.

    ids: (I,) int64, distinct. read: the captions of the images with these numbers (n,), which ascend. For a data set
    they remain in the memory-mapped pages of its file.
    """

    def __init__(self, ids: np.ndarray, read: Callable[[np.ndarray], list[list[str]]]) -> None:
        self._ids, self._read = ids, read

    @classmethod
    def of(cls, dataset: Dataset, tokenizer: str | None = None) -> References:
        """Those of a data set, numbered as its rows: raw captions, or with a tokenizer the texts that it splits.

        The ids and the rows need 16 bytes of memory per image.
        """
        column, rows = text_column(tokenizer), dataset.rows
        ids: np.ndarray = dataset.values("image_id").to_numpy()

        def read(numbers: np.ndarray) -> list[list[str]]:
            return [texts for part in dataset.rounds(rows[numbers], column) for texts in part[column].to_pylist()]

        return cls(ids, read)

    def selected(self, numbers: np.ndarray) -> References:
        """Those of the images with these numbers (n,), which ascend, numbered anew in their order."""
        return References(self._ids[numbers], lambda chosen: self._read(numbers[chosen]))

    @classmethod
    def of_texts(cls, texts: Mapping[int, Sequence[str]]) -> References:
        """The captions by image id."""
        captions = [list(each) for each in texts.values()]
        return cls(np.array(list(texts), np.int64), lambda numbers: [captions[each] for each in numbers.tolist()])

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> list[str]:
        """The captions of one image."""
        return self._read(np.array([index]))[0]

    def __iter__(self) -> Iterator[list[str]]:
        """The captions of each image."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[list[str]]]:
        """The captions of each image, for some images at a time, which are the same in every process."""
        for begin in range(0, len(self), _BATCH):
            yield self._read(np.arange(begin, min(begin + _BATCH, len(self))))

    def content(self) -> Iterator[bytes]:
        """Bytes that are equal if and only if all captions and their order are. Image ids do not count."""
        return (json.dumps(batch).encode() for batch in self.batches())

    def indices_of(self, images: Sequence[int]) -> np.ndarray:
        """The numbers (len(images),) int64 of these image ids. Raises KeyError for an id without captions."""
        wanted = np.asarray(images, np.int64)
        ids, order = self._sorted_ids
        position = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
        if len(unknown := wanted[ids[position] != wanted] if len(ids) else wanted):
            raise KeyError(int(unknown[0]))
        return order[position]

    @cached_property
    def _sorted_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The image ids in ascending order, and the number of each; 16 bytes per image."""
        order = np.argsort(self._ids)
        return self._ids[order], order
