"""Reads rows of shards: from memory maps of local files, or in ranges from remote files that are not in the cache.

All rows of a shard have the same size. The kernel is first advised of all rows to come, which are then read in their
order on disk. So the kernel reads ahead instead of one row at a time. Of a remote store, training copies whole shards
to the cache before it reads them, and lets them go after use (`ReadAhead`).
"""

from __future__ import annotations

import hashlib
import io
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.cache import ChangedError, ShardCache
from raycap.pipeline.storage.digests import has_digest
from raycap.pipeline.storage.path import StoragePath

MAX_READ_BYTES = 2**36  # of a store that one process reads before training; a minute at 1 GB/s
MAX_OPEN = 400  # open shards; each needs a file descriptor, and a process usually may have 1,024
NUM_COPIES, NUM_READS = 4, 8  # shards copied to the cache, and remote rows read, at the same time
INDEX = "index"  # the folder of a store with manifests of many shards
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
    (store / INDEX).delete_folder()


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

    def __init__(
        self, folder: StoragePath, infos: Sequence[ShardInfo], cache: ShardCache | None, *, by_shards: bool = False
    ) -> None:
        """by_shards: read from the cache only the shards that `hold` has copied there, and others in ranges.

        Otherwise a shard is copied at its first use, and those beyond the cache's limit, which would evict others, are
        read in ranges.
        """
        self.folder, self.infos, self.cache = folder, infos, cache
        if cache is not None:
            self._fits = (np.cumsum([info.bytes for info in infos]) <= cache.limit) & (not by_shards)
        self._held: set[int] = set()
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

    def hold(self, number: int) -> bool:
        """Copies a remote shard to the cache, so that its rows are read there. Returns False if it has no room."""
        if self._copied(number) is None:
            return False
        with self._lock:
            self._held.add(number)
            self._open.pop(number, None)  # rows may have been read in ranges
        return True

    def let_go(self, number: int) -> None:
        """Makes a shard that `hold` has copied one of the first to leave the cache."""
        with self._lock:
            self._held.discard(number)
            self._open.pop(number, None)
            self._boxes.pop(number, None)
        if self.cache is not None:
            self.cache.let_go(self.folder / f"{self.infos[number].shard}.npy", self.infos[number].sha256)

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
            return self._copied(number) if self._fits[number] or number in self._held else None
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


class ReadAhead:
    """Holds the shards of the current step of training in the cache, and those of later steps as far as it has room.

    A thread goes through the steps and copies the shards of each. It waits while shards that training may still read
    fill the budget. When training has reached a step whose shards exceed the budget alone, the thread leaves some out,
    and their rows are read in ranges.
    """

    def __init__(
        self, maps: ShardMaps, shards_at: Callable[[int], np.ndarray], start: int, stop: int, budget: int
    ) -> None:
        """shards_at: the shards around each step from start to stop - 1. budget: in bytes."""
        self.maps, self.shards_at, self.start, self.stop, self.budget = maps, shards_at, start, stop, budget
        self._changed = threading.Condition()
        self._last_use: dict[int, int] = {}  # by shard in the cache: the last step known to read it
        self._held_bytes = 0
        self._reached = start - 1  # the step that training reads
        self._begun = self._done = start - 1  # the last step whose shards are known, and that whose copies have ended
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the thread after the copies that it is making, and lets all shards go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._let_go(list(self._last_use))

    def reach(self, step: int) -> None:
        """Waits until the shards of a step are in the cache, and lets those go that only earlier steps have read.

        Steps must be reached in ascending order. Raises the error that stopped the copies.
        """
        with self._changed:
            self._reached = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._begun >= step or self._error)
            self._let_go([shard for shard, last in self._last_use.items() if last < step])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= step or self._error)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(NUM_COPIES) as pool:
                for step in range(self.start, self.stop):
                    copies = [pool.submit(self._copy, shard) for shard in self._admitted(step)]
                    for copy in copies:
                        copy.result()
                    with self._changed:
                        self._done = step
                        self._changed.notify_all()
                        if self._is_closed:
                            return
        except BaseException as error:  # raised by `reach`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admitted(self, step: int) -> Sequence[int]:
        """Waits until the budget has room for the shards of a step, and returns those of them that must be copied."""
        shards, admitted = self.shards_at(step).tolist(), []
        with self._changed:
            self._last_use.update((shard, step) for shard in shards if shard in self._last_use)
            self._begun = step
            self._changed.notify_all()
            for shard in shards:
                if shard not in self._last_use and self._admit(shard, step):
                    admitted.append(shard)
        return admitted

    def _admit(self, shard: int, step: int) -> bool:
        """Waits for room for a shard; False if there is none in the step that training reads, or after `__exit__`."""
        size = self.maps.infos[shard].bytes

        def has_room() -> bool:
            return self._held_bytes + size <= self.budget

        self._changed.wait_for(lambda: has_room() or self._reached >= step or self._is_closed)
        if not has_room() or self._is_closed:
            return False
        self._last_use[shard], self._held_bytes = step, self._held_bytes + size
        return True

    def _copy(self, shard: int) -> None:
        """Copies an admitted shard. It is let go at once if the disk has no room for it."""
        if not self.maps.hold(shard):
            with self._changed:
                self._let_go([shard])

    def _let_go(self, shards: Sequence[int]) -> None:
        """The caller has the lock."""
        for shard in shards:
            del self._last_use[shard]
            self._held_bytes -= self.maps.infos[shard].bytes
            self.maps.let_go(shard)
