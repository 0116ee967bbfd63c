"""The raw reference captions of images, as columns of Arrow. No list has an item for each image of the data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from pipeline.data.dataset import Dataset
from pipeline.language.tokenizers import text_column

_BATCH = 1024  # images whose captions are Python lists at a time


class References:
    """The captions of each image. An image is numbered by its position, and the image ids only serve to look it up.

    ids: int64, distinct. captions: lists of text, for a data set in the memory-mapped pages of its file.
    """

    def __init__(self, ids: pa.ChunkedArray, captions: pa.ChunkedArray) -> None:
        self._ids, self._captions = ids, captions

    @classmethod
    def of(cls, dataset: Dataset, tokenizer: str | None = None) -> References:
        """Those of a data set, numbered as its rows: raw captions, or with a tokenizer the texts that it splits."""
        return cls(dataset.table["image_id"], dataset.table[text_column(tokenizer)])

    @classmethod
    def of_texts(cls, texts: Mapping[int, Sequence[str]]) -> References:
        """The captions by image id."""
        captions = pa.array(list(texts.values()), pa.list_(pa.string()))
        return cls(pa.chunked_array([pa.array(list(texts), pa.int64())]), pa.chunked_array([captions]))

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, index: int) -> list[str]:
        """The captions of one image."""
        captions: list[str] = self._captions[index].as_py()
        return captions

    def __iter__(self) -> Iterator[list[str]]:
        """The captions of each image."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[list[str]]]:
        """The captions of each image, for some images at a time, which are the same in every process."""
        for begin in range(0, len(self), _BATCH):
            yield self._captions.slice(begin, _BATCH).to_pylist()

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
        ids = self._ids.to_numpy()
        order = np.argsort(ids)
        return ids[order], order
