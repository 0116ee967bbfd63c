"""Rows out of fixed-stride shards: through memory maps of local files, or ranges of remote ones too large to stage.

Rows are asked for in the order of the disk, and the kernel is told of all of them before the first is copied:
cold, that is the difference between one request at a time and the disk's full queue.
"""

from __future__ import annotations

import io
import mmap
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.storage.cache import ShardCache
from pipeline.storage.path import StoragePath

MAX_OPEN = 400  # each map holds a file descriptor; the usual limit is 1,024
_HEADER = 128  # what numpy writes before the data of a small-dimensional array, padded to 64 bytes


class _Shard:
    """One shard: shape, dtype and either a map or the place that ranges come from."""

    def __init__(self, place: StoragePath, local: Path | None) -> None:
        self.place = place
        self.map: mmap.mmap | None = None
        if local is not None:
            with local.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.map.madvise(mmap.MADV_RANDOM)  # else each touch reads megabytes around it
            header = self.map[: 2 * _HEADER]
        else:
            header = place.read_range(0, 2 * _HEADER)
        self.shape, self.dtype, self.start = read_header(header)
        self.stride = int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def expect(self, row: int) -> None:
        """Tells the kernel that a row will be read."""
        if self.map is not None:
            first = self.start + row * self.stride
            page = first - first % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_WILLNEED, page, min(first + self.stride, len(self.map)) - page)

    def row(self, row: int) -> np.ndarray:
        first = self.start + row * self.stride
        if self.map is None:
            flat = np.frombuffer(self.place.read_range(first, self.stride), self.dtype)
        else:
            flat = np.frombuffer(self.map, self.dtype, self.stride // self.dtype.itemsize, first)
        return flat.reshape(self.shape[1:])


def read_header(data: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and offset of the data of an .npy file from its first bytes. ValueError for anything else."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"unknown .npy version {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran or dtype.hasobject:
        raise ValueError("shards are C-ordered arrays of plain numbers")
    return shape, dtype, stream.tell()


class ShardMaps:
    """The shards of a store, opened when first touched, the longest unused closed first."""

    def __init__(self, folder: StoragePath, names: list[str], facts: dict[str, Any], staged: ShardCache | None) -> None:
        self.folder, self.names, self.facts, self.staged = folder, names, facts, staged
        if staged is not None:  # a store above the cache's limit would evict its own shards: the rest is read in ranges
            self._fits = np.cumsum([facts[name]["bytes"] for name in names]) <= staged.limit
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._boxes: dict[int, np.ndarray] = {}

    def read(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """(len(rows), N, C): row `rows[i]` of shard number `shards[i]`."""
        order = np.lexsort((rows, shards))
        if not len(order):
            return np.empty((0, 0, 0), np.float16)
        self._stage(np.unique(shards))
        first = self._shard(int(shards[order[0]]))
        result = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for index in order:
            self._shard(int(shards[index])).expect(int(rows[index]))

        def copy(index: int) -> None:
            result[index] = self._shard(int(shards[index])).row(int(rows[index]))

        ranges = [index for index in order if self._shard(int(shards[index])).map is None]
        for index in order:
            if self._shard(int(shards[index])).map is not None:
                copy(index)
        if ranges:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(copy, ranges))
        return result

    def _stage(self, numbers: np.ndarray) -> None:
        """Fetches what is not here yet, several shards at a time."""
        if self.staged is not None:
            new = [int(number) for number in numbers if int(number) not in self._open]
            if len(new) > 1:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(self._local, new))

    def _local(self, number: int) -> Path | None:
        name = self.names[number]
        place = self.folder / f"{name}.npy"
        if self.staged is None:
            return place.path
        if not self._fits[number]:
            return None
        return self.staged.get(place, self.facts[name]["bytes"], self.facts[name]["sha256"])

    def read_boxes(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """(len(rows), N, 4) float32."""
        return np.stack([self._boxes_of(int(shard))[row] for shard, row in zip(shards, rows, strict=True)])

    def _boxes_of(self, number: int) -> np.ndarray:
        if number not in self._boxes:
            name = self.names[number]
            if self.facts[name]["boxes_sha256"]:
                data = (self.folder / f"{name}.boxes.npy").read_bytes()
                self._boxes[number] = np.load(io.BytesIO(data), allow_pickle=False)
            else:  # a file may have boxes for some images only
                rows, regions = self._shard(number).shape[:2]
                self._boxes[number] = np.zeros((rows, regions, 4), np.float32)
        return self._boxes[number]

    def _shard(self, number: int) -> _Shard:
        found = self._open.get(number)
        if found is None:
            place = self.folder / f"{self.names[number]}.npy"
            found = self._open[number] = _Shard(place, self._local(number))
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)  # its memory lives until the last row that is copied from it is
        else:
            self._open.move_to_end(number)
        return found
