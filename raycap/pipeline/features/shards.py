"""Reads rows of shards: from memory maps of local files, or in ranges from remote files that are not in the cache.

All rows of a shard have the same size. The kernel is first advised of all rows to come, which are then read in their
order on disk. So the kernel reads ahead instead of one row at a time.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.cache import ChangedError, ShardCache
from raycap.pipeline.storage.digests import has_digest
from raycap.pipeline.storage.path import StoragePath

MAX_READ_BYTES = 2**36  # of a store that one process reads before training; a minute at 1 GB/s
MAX_OPEN = 400  # open shards; each needs a file descriptor, and a process usually may have 1,024
NUM_COPIES, NUM_READS = 4, 8  # shards copied to the cache, and remote rows read, at the same time
INDEX = "index.parquet"  # the file of a store with the manifests of many shards
_HEADER_BYTES = 256  # longer than numpy's header of an array of few dimensions


@dataclass(frozen=True)
class ShardInfo:
    """The manifest's columns about a shard: its name, the digest and size of its file, the digest of its boxes."""

    shard: str
    sha256: str
    bytes: int
    boxes_sha256: str | None


def remove_manifest(store: StoragePath, shard: str) -> None:
    """Removes a shard's manifest, and the index: it would hide the manifest of a new shard with the same images."""
    (store / f"manifest/{shard}.parquet").delete()
    (store / INDEX).delete()


class _Shard:
    """One open shard. A local shard has a memory map; of a remote shard, `map` is None and rows are read in ranges."""

    def __init__(self, path: StoragePath, local: Path | None) -> None:
        self.path, self.map = path, None if local is None else _map_file(local)
        header = path.read_range(0, _HEADER_BYTES) if self.map is None else self.map[:_HEADER_BYTES]
        self.shape, self.dtype, self.start = _read_header(header)
        # `start` is the offset of the first row and `stride` the size of a row, in bytes
        self.stride = int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def prefetch(self, row: int) -> None:
        """Advises the kernel that a row will be read."""
        if self.map is not None:
            first = self.start + row * self.stride
            page = first - first % mmap.PAGESIZE  # advice must begin at a page
            self.map.madvise(mmap.MADV_WILLNEED, page, min(first + self.stride, len(self.map)) - page)

    def row(self, row: int) -> np.ndarray:
        """The values (N, C) of one row."""
        first = self.start + row * self.stride
        if self.map is None:
            flat = np.frombuffer(self.path.read_range(first, self.stride), self.dtype)
        else:
            flat = np.frombuffer(self.map, self.dtype, self.stride // self.dtype.itemsize, first)
        return flat.reshape(self.shape[1:])


def _map_file(path: Path) -> mmap.mmap:
    """A memory map of a whole file."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content.madvise(mmap.MADV_RANDOM)  # without this advice each access would read megabytes ahead
    return content


def _read_header(data: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
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
        """cache: of a remote store. A shard is copied there at its first use.

        The shards beyond the cache's limit would evict others, so they are read in ranges.
        """
        self.folder, self.infos, self.cache = folder, infos, cache
        if cache is not None:
            self._fits = np.cumsum([info.bytes for info in infos]) <= cache.limit
        self._lock = threading.RLock()  # training prefetches in a thread while it validates
        self._open: OrderedDict[int, _Shard] = OrderedDict()  # the least recently used shard comes first
        self._boxes: dict[int, np.ndarray] = {}
        self._whole: set[int] = set()  # the local shards that were compared with their digests

    def damages(self, numbers: Sequence[int]) -> dict[int, str]:
        """{number: a sentence} for the damaged ones of these shards.

        Local files are compared with their digests (`pipeline.storage.digests`), if they have at most MAX_READ_BYTES
        together. Otherwise only the existence and the size are compared: a process that uses a shard compares the
        digest of a local one at its first use, and of a remote one when it downloads it.
        """
        is_read = not self.folder.is_remote and sum(self.infos[number].bytes for number in numbers) <= MAX_READ_BYTES
        sizes = {} if is_read else {name: entry.size for name, entry in self.folder.list().items()}

        def find(number: int) -> str:
            info = self.infos[number]
            if is_read:
                return self._local_damage(info)
            name = f"{info.shard}.npy"
            found = sizes.get(name)
            return "" if found == info.bytes else f"{self.folder / name} has {found or 0} bytes of {info.bytes}"

        with ThreadPoolExecutor(NUM_COPIES) as pool:  # reading and hashing release the interpreter's lock
            return {number: text for number, text in zip(numbers, pool.map(find, numbers), strict=True) if text}

    def _local_damage(self, info: ShardInfo) -> str:
        """A sentence about the damage of a local shard; "" for a whole one."""
        digests = {f"{info.shard}.npy": info.sha256}
        if info.boxes_sha256:
            digests[f"{info.shard}.boxes.npy"] = info.boxes_sha256
        for name, digest in digests.items():
            try:
                if not has_digest((self.folder / name).path, digest):
                    return f"{self.folder / name} does not have the digest in its manifest"
            except FileNotFoundError:
                return f"{self.folder / name} is missing"
        return ""

    def read(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The rows (len(rows), N, C): item i is row `rows[i]` of shard number `shards[i]`."""
        order = np.lexsort((rows, shards)).tolist()  # by shard, then by row: the order on disk
        if not order:
            return np.empty((0, 0, 0), np.float16)
        shard_numbers, row_numbers = shards.tolist(), rows.tolist()
        with self._lock:
            new = sorted(set(shard_numbers) - self._open.keys())
        if len(new) > 1 and (self.cache is not None or not self._whole.issuperset(new)):  # copies or checks several
            with ThreadPoolExecutor(NUM_COPIES) as pool:
                list(pool.map(self._local_file, new))
        first = self.shard(shard_numbers[order[0]])
        result = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for index in order:
            self.shard(shard_numbers[index]).prefetch(row_numbers[index])

        def copy_row(index: int) -> None:
            result[index] = self.shard(shard_numbers[index]).row(row_numbers[index])

        remote = []
        for index in order:
            if self.shard(shard_numbers[index]).map is None:
                remote.append(index)
            else:
                copy_row(index)
        if remote:
            with ThreadPoolExecutor(NUM_READS) as pool:
                list(pool.map(copy_row, remote))
        return result

    def read_boxes(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The boxes (len(rows), N, 4) float32: item i is row `rows[i]` of shard number `shards[i]`."""
        return np.stack([self._boxes_of(shard)[row] for shard, row in zip(shards.tolist(), rows, strict=True)])

    def shard(self, number: int) -> _Shard:
        """The open shard with this number. Opening it may close another one. Several threads may ask."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                path = self.folder / f"{self.infos[number].shard}.npy"
                self._open[number] = _Shard(path, self._local_file(number))
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)  # unmapped once no array refers to it
            return self._open[number]

    def _copied(self, number: int) -> Path | None:
        """The copy of a remote shard in the cache; None if it has no room for it."""
        assert self.cache is not None
        info = self.infos[number]
        try:
            return self.cache.get(self.folder / f"{info.shard}.npy", info.bytes, info.sha256)
        except (FileNotFoundError, ChangedError) as error:
            raise self._reject(info, str(error)) from error

    def _local_file(self, number: int) -> Path | None:
        """The local file of a shard; None for a remote one that is not in the cache."""
        info = self.infos[number]
        if self.cache is not None:
            return self._copied(number) if self._fits[number] else None
        path = self.folder / f"{info.shard}.npy"
        if number not in self._whole:
            if damage := self._local_damage(info):
                raise self._reject(info, damage)
            self._whole.add(number)
        return path.path

    def _reject(self, info: ShardInfo, damage: str) -> DamagedError:
        """The error about a damaged shard. Removes its manifest, so that the next extraction computes its features."""
        with suppress(OSError):  # a storage that cannot be written
            remove_manifest(StoragePath(self.folder.uri.removesuffix("/shards"), self.folder.options), info.shard)
        return DamagedError(f"{damage}; the same command computes its features again")

    def _boxes_of(self, number: int) -> np.ndarray:
        """The boxes of a shard; zeros where it has none, because a detector's file may lack those of some images."""
        if number not in self._boxes:
            info = self.infos[number]
            if info.boxes_sha256:
                data = (self.folder / f"{info.shard}.boxes.npy").read_bytes()
                if hashlib.sha256(data).hexdigest() != info.boxes_sha256:
                    raise self._reject(info, f"{self.folder / info.shard}.boxes.npy does not have its digest")
                self._boxes[number] = np.load(io.BytesIO(data), allow_pickle=False)
            else:
                num_rows, num_regions = self.shard(number).shape[:2]
                self._boxes[number] = np.zeros((num_rows, num_regions, 4), np.float32)
        return self._boxes[number]
