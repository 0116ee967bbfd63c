"""Reads rows of shards: from memory maps of local files, or in ranges from remote files that exceed the cache.

All rows of a shard have the same size. The kernel is first advised of all rows that will be read, and the rows are read
in their order on disk. So the kernel reads them ahead, instead of one row at a time.
"""

from __future__ import annotations

import io
import mmap
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.storage.cache import ShardCache
from pipeline.storage.path import StoragePath

MAX_OPEN = 400  # shards; each needs a file descriptor, of which a process usually has at most 1,024
_HEADER_BYTES = 256  # numpy's header of an array of few dimensions is shorter


@dataclass(frozen=True)
class ShardInfo:
    """The manifest's columns about a shard: its name, the digest and size of its file, the digest of its boxes."""

    shard: str
    sha256: str
    bytes: int
    boxes_sha256: str | None


class _Shard:
    """One open shard. A local shard has a memory map; of a remote shard, `map` is None and rows are read in ranges."""

    def __init__(self, path: StoragePath, local: Path | None) -> None:
        self.path = path
        self.map: mmap.mmap | None = None
        if local is not None:
            with local.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.map.madvise(mmap.MADV_RANDOM)  # without this advice each access would read megabytes ahead
            header = self.map[:_HEADER_BYTES]
        else:
            header = path.read_range(0, _HEADER_BYTES)
        self.shape, self.dtype, self.start = read_header(header)
        self.stride = int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def prefetch(self, row: int) -> None:
        """Advises the kernel that a row will be read."""
        if self.map is not None:
            first = self.start + row * self.stride
            page = first - first % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_WILLNEED, page, min(first + self.stride, len(self.map)) - page)

    def row(self, row: int) -> np.ndarray:
        first = self.start + row * self.stride
        if self.map is None:
            flat = np.frombuffer(self.path.read_range(first, self.stride), self.dtype)
        else:
            flat = np.frombuffer(self.map, self.dtype, self.stride // self.dtype.itemsize, first)
        return flat.reshape(self.shape[1:])


def read_header(data: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and offset of the data of an .npy file, from its first bytes. Raises ValueError for other bytes."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"unknown .npy version {version}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran or dtype.hasobject:
        raise ValueError("shards are C-ordered arrays of plain numbers")
    return shape, dtype, stream.tell()


class ShardMaps:
    """The shards of a store. A shard is opened at first use; beyond MAX_OPEN the least recently used one is closed."""

    def __init__(self, folder: StoragePath, infos: Sequence[ShardInfo], cache: ShardCache | None) -> None:
        self.folder, self.infos, self.cache = folder, infos, cache
        if cache is not None:  # shards beyond the limit are read in ranges: they would evict others
            self._fits = np.cumsum([info.bytes for info in infos]) <= cache.limit
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._boxes: dict[int, np.ndarray] = {}

    def read(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The rows (len(rows), N, C): item i is row `rows[i]` of shard number `shards[i]`."""
        order = np.lexsort((rows, shards))
        if not len(order):
            return np.empty((0, 0, 0), np.float16)
        self._stage(np.unique(shards))
        first = self._shard(int(shards[order[0]]))
        result = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for index in order:
            self._shard(int(shards[index])).prefetch(int(rows[index]))

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
        """Copies the shards that are not open to the cache, several at a time."""
        if self.cache is not None:
            new = [int(number) for number in numbers if int(number) not in self._open]
            if len(new) > 1:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(self._local_file, new))

    def _local_file(self, number: int) -> Path | None:
        """The local file of a shard; None for a remote one that does not fit the cache."""
        info = self.infos[number]
        path = self.folder / f"{info.shard}.npy"
        if self.cache is None:
            return path.path
        return self.cache.get(path, info.bytes, info.sha256) if self._fits[number] else None

    def read_boxes(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The boxes (len(rows), N, 4) float32: item i is row `rows[i]` of shard number `shards[i]`."""
        return np.stack([self._boxes_of(int(shard))[row] for shard, row in zip(shards, rows, strict=True)])

    def _boxes_of(self, number: int) -> np.ndarray:
        if number not in self._boxes:
            info = self.infos[number]
            if info.boxes_sha256:
                data = (self.folder / f"{info.shard}.boxes.npy").read_bytes()
                self._boxes[number] = np.load(io.BytesIO(data), allow_pickle=False)
            else:  # zeros, because a detector's file may have boxes for some images only
                rows, regions = self._shard(number).shape[:2]
                self._boxes[number] = np.zeros((rows, regions, 4), np.float32)
        return self._boxes[number]

    def _shard(self, number: int) -> _Shard:
        """The open shard; opens it, and closes another one if too many are open."""
        shard = self._open.get(number)
        if shard is None:
            path = self.folder / f"{self.infos[number].shard}.npy"
            shard = self._open[number] = _Shard(path, self._local_file(number))
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)  # unmapped once no array refers to it
        else:
            self._open.move_to_end(number)
        return shard
