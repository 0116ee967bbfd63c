"""The feature store: files of features, called shards, in which content keys name the images.

    features/<feature_key>/shards/<name>.npy        (rows, N, C), one dtype
                           manifest/<name>.parquet  a row of MANIFEST per image; written after the shard
                           quarantine.parquet       images without features, with the reason
                           COMPLETE                 JSON: number of rows, and the description of the extraction

Readers ignore a shard without a manifest, because its writer died. A later extraction removes such a shard. A shard's
name is a hash of its content keys, so that a repeated task or a concurrent extraction writes the same file. The folder
is local or on S3. Remote shards are copied to a local cache of limited size. When a machine first uses a shard, it
checks the shard's digest. The manifest of a damaged shard is removed, so that the next extraction computes its features
again.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.models.config import Values
from raycap.pipeline.config.sections import FeatureSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import UNREADABLE
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.storage.cache import ChangedError, shard_cache
from raycap.pipeline.storage.digests import has_digest
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.tables import read_cache, to_bytes

QUARANTINE_FILE = "quarantine.parquet"
QUARANTINE = pa.schema([("uri", pa.string()), ("key", pa.string()), ("reason", pa.string())])
MANIFEST = pa.schema(
    [
        ("key", pa.string()),  # content key of the image
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("sha256", pa.string()),  # digest of the shard file
        ("bytes", pa.int64()),  # size of the shard file
        ("length", pa.int32()),  # number of regions in the row; null for grids, which have no padding
        ("boxes", pa.list_(pa.float32())),  # x0 y0 x1 y1 of each region; null for grids and for regions without boxes
    ]
)
MAX_OPEN = 400  # open shards, because each needs a file descriptor, and a process usually may have 1,024
NUM_COPIES, NUM_READS = 4, 8  # at the same time: shards that are copied to the cache, and remote rows that are read
_HEADER_BYTES = 256  # more than the header of an .npy file with an array of three dimensions
_NUM_MANIFESTS = 32  # manifests that are read at the same time

logger = logging.getLogger(__name__)


def feature_key(description: Values) -> str:
    """The name of a store: a hash of the description, which contains everything that changes features."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def shard_name(content_keys: Sequence[str]) -> str:
    """The name of the shard of these images: a hash of their keys."""
    return hashlib.sha256("\n".join(content_keys).encode()).hexdigest()[:32]


def manifest_path(folder: StoragePath, shard: str) -> StoragePath:
    """The file of a shard's manifest."""
    return folder / f"manifest/{shard}.parquet"


def has_shard(folder: StoragePath | Path, content_keys: Sequence[str]) -> bool:
    """True if there is a shard of exactly these images, so that a repeated task need not compute it again."""
    return manifest_path(storage_path(folder), shard_name(content_keys)).exists()


def write_shard(
    folder: StoragePath | Path,
    content_keys: Sequence[str],
    features: np.ndarray,
    lengths: Sequence[int] | None = None,
    boxes: Sequence[np.ndarray | None] | None = None,
) -> None:
    """Writes a shard of `features` (rows, N, C) for the images with these content keys, then the shard's manifest.

    lengths: (rows,) the number of regions of each image, or None for grids. boxes: (R, 4) of each image, or None.
    """
    root, name, count = storage_path(folder), shard_name(content_keys), len(content_keys)
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(features), allow_pickle=False)
    shard = buffer.getbuffer()
    (root / f"shards/{name}.npy").write_bytes(shard)
    rows = {
        "key": list(content_keys),
        "shard": [name] * count,
        "row": range(count),
        "sha256": [hashlib.sha256(shard).hexdigest()] * count,
        "bytes": [len(shard)] * count,
        "length": [None] * count if lengths is None else lengths,
        "boxes": [None if each is None else each.ravel() for each in boxes or [None] * count],
    }
    manifest_path(root, name).write_bytes(to_bytes(pa.table(rows, schema=MANIFEST)))


def _read_manifests(folder: StoragePath) -> pa.Table:
    """The manifest rows of all images in a store.

    A manifest counts as missing if it is damaged, or if another process removes it meanwhile.
    """
    names = sorted(name for name in (folder / "manifest").list() if name.endswith(".parquet"))
    with ThreadPoolExecutor(_NUM_MANIFESTS) as pool:
        tables = pool.map(lambda name: read_cache(folder / "manifest" / name, MANIFEST), names)
        return pa.concat_tables([MANIFEST.empty_table(), *tables]).combine_chunks()


@dataclass(frozen=True)
class ShardInfo:
    """A shard's columns in the manifest: its name, and the digest and size of its file."""

    shard: str
    sha256: str
    bytes: int


class _Shard:
    """An open shard. A local file is memory-mapped. Of a remote file, single rows are read as ranges of bytes."""

    def __init__(self, path: StoragePath, local: Path | None) -> None:
        self.path, self.map = path, None
        if local is not None:
            with local.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.map.madvise(mmap.MADV_RANDOM)  # without this advice each access would read megabytes ahead
        header = io.BytesIO(path.read_range(0, _HEADER_BYTES) if self.map is None else self.map[:_HEADER_BYTES])
        np.lib.format.read_magic(header)
        self.shape, _, self.dtype = np.lib.format.read_array_header_1_0(header)
        # `start` is the offset of the first row, and `stride` the size of a row, in bytes.
        self.start, self.stride = header.tell(), int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def prefetch(self, row: int) -> None:
        """Advises the kernel that a row will be read."""
        if self.map is not None:
            first = self.start + row * self.stride
            page = first - first % mmap.PAGESIZE  # advice must begin at the start of a page
            self.map.madvise(mmap.MADV_WILLNEED, page, min(first + self.stride, len(self.map)) - page)

    def row(self, row: int) -> np.ndarray:
        """The values (N, C) of one row."""
        first = self.start + row * self.stride
        if self.map is None:
            flat = np.frombuffer(self.path.read_range(first, self.stride), self.dtype)
        else:
            flat = np.frombuffer(self.map, self.dtype, self.stride // self.dtype.itemsize, first)
        return flat.reshape(self.shape[1:])


class FeatureStore:
    """Reads the features of a store. Rows that are written after the store is opened are not visible.

    Opening reads the manifests. A shard is opened, and copied to the cache if it is remote, at its first use. Beyond
    MAX_OPEN shards, the least recently used one is closed.
    """

    def __init__(
        self, folder: StoragePath | Path | str, cache: Path | None = None, cache_bytes: int | None = None
    ) -> None:
        """cache: the folder for copies of remote shards. cache_bytes: its size, or None for half of the free space."""
        self.folder = storage_path(folder)
        rows = _read_manifests(self.folder)
        self.keys = rows["key"]
        shards = rows["shard"].combine_chunks().dictionary_encode()
        firsts = np.unique(shards.indices.to_numpy(), return_index=True)[1]
        columns = rows.select(["shard", "sha256", "bytes"]).take(firsts)
        self.shards = [ShardInfo(**row) for row in columns.to_pylist()]
        # For each image: the number of its shard in `shards`, its row there, and its number of regions (-1 for grids).
        self._shard, self._row = shards.indices.to_numpy(), rows["row"].to_numpy()
        self._length: np.ndarray = pc.fill_null(rows["length"], -1).to_numpy()
        self._has_regions = bool((self._length >= 0).any())  # computed once, because every batch needs it
        self._boxes = rows["boxes"] if rows["boxes"].null_count < len(rows) else None
        self._cache = shard_cache(cache_bytes, cache) if self.folder.is_remote else None
        if self._cache is not None:
            # Shards beyond the cache's size are not copied, because they would evict the first shards. Instead, their
            # rows are read as ranges.
            self._fits = np.cumsum([info.bytes for info in self.shards]) <= self._cache.limit
        self._lock = threading.RLock()  # because training prefetches in a thread while it validates
        self._open: OrderedDict[int, _Shard] = OrderedDict()  # the least recently used shard comes first
        self._whole: set[int] = set()  # the local shards that were compared with their digests

    def __len__(self) -> int:
        """Number of images in the store."""
        return int(pc.count_distinct(self.keys).as_py())

    def contains(self, content_keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """(len(content_keys),) bool: true for each image that the store has."""
        return np.asarray(pc.is_in(content_keys, value_set=self.keys))

    def locate(self, content_keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """The positions (len(content_keys),) int64 of images in the store, for `gather_at` and `regions_at`.

        Raises DamagedError with the first key that the store lacks.
        """
        positions = np.asarray(pc.fill_null(pc.index_in(content_keys, value_set=self.keys), -1), np.int64)
        missing = np.flatnonzero(positions < 0)
        if missing.size:
            key = content_keys[int(missing[0])].as_py()
            raise DamagedError(f"features of image {key} are not in {self.folder}; run the extraction again")
        return positions

    def gather_at(self, positions: np.ndarray) -> np.ndarray:
        """The features (len(positions), N, C) of images. An image with fewer than N regions is padded with zeros."""
        if not len(positions):
            return np.empty((0, 0, 0), np.float16)
        shards, rows = self._shard[positions].tolist(), self._row[positions].tolist()
        self._prepare(set(shards))
        first = self._opened(shards[0])
        result = np.empty((len(rows), *first.shape[1:]), first.dtype)
        order = np.lexsort((rows, shards)).tolist()  # by shard, then by row, which is the order on disk
        for index in order:
            self._opened(shards[index]).prefetch(rows[index])

        def copy_row(index: int) -> None:
            shard = self._opened(shards[index])
            with self._damage_rejected(shards[index]):
                result[index] = shard.row(rows[index])

        remote = []
        for index in order:
            if self._opened(shards[index]).map is None:
                remote.append(index)
            else:
                copy_row(index)
        if remote:
            with ThreadPoolExecutor(NUM_READS) as pool:
                list(pool.map(copy_row, remote))
        return result

    def _prepare(self, shards: set[int]) -> None:
        """Copies or checks shards in parallel if several of them need it."""
        with self._lock:
            new = sorted(shards - self._open.keys())
        if len(new) > 1 and (self._cache is not None or not self._whole.issuperset(new)):
            with ThreadPoolExecutor(NUM_COPIES) as pool:
                list(pool.map(self._local_file, new))

    def regions_at(self, positions: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The numbers of regions (len(positions),) int64, and their boxes (len(positions), N, 4) float32, of images.

        Both results are None for grids. The boxes are also None if no image of the store has boxes. Single images
        without boxes, and regions that are padding, have boxes of zeros.
        """
        if not self._has_regions:
            return None, None
        lengths = self._length[positions].astype(np.int64)
        if self._boxes is None or not len(positions):
            return lengths, None
        num_regions = self._opened(int(self._shard[positions[0]])).shape[1]
        boxes = np.zeros((len(positions), num_regions, 4), np.float32)
        for row, corners in enumerate(self._boxes.take(pa.array(positions))):
            if corners.is_valid:
                boxes[row, : lengths[row]] = np.asarray(corners.values).reshape(-1, 4)
        return lengths, boxes

    def verify(self) -> list[str]:
        """Reads all shards. Returns one sentence for each damaged shard."""
        remedy = f"delete its file in {self.folder / 'manifest'}, and extract again"
        with ThreadPoolExecutor(NUM_COPIES) as pool:  # hashing and reading release the interpreter's lock
            damages = list(pool.map(lambda info: self._damage(info, again=True), self.shards))
        return [f"{damage}; {remedy}" for damage in damages if damage]

    def _path(self, info: ShardInfo) -> StoragePath:
        return self.folder / f"shards/{info.shard}.npy"

    def _damage(self, info: ShardInfo, *, again: bool = False) -> str:
        """A sentence about the damage of a shard, or "" if it has none.

        If `again` is false, a local file whose digest this machine has checked before is not read again.
        """
        file = self._path(info)
        try:
            if again or file.is_remote:
                is_whole = hashlib.sha256(file.read_bytes()).hexdigest() == info.sha256
            else:
                is_whole = has_digest(file.path, info.sha256)
        except FileNotFoundError:
            return f"{file} is missing"
        return "" if is_whole else f"{file} does not have the digest in its manifest"

    def _opened(self, number: int) -> _Shard:
        """The shard with this number in `shards`, opened if necessary, which may close another. Safe for threads."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                local = self._local_file(number)
                with self._damage_rejected(number):
                    self._open[number] = _Shard(self._path(self.shards[number]), local)
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)  # its file is unmapped when no array refers to it
            return self._open[number]

    def _local_file(self, number: int) -> Path | None:
        """The local file of a shard, or None if a remote shard does not fit into the cache. Raises DamagedError."""
        info, path = self.shards[number], self._path(self.shards[number])
        if self._cache is None:
            if number not in self._whole:
                if damage := self._damage(info):
                    raise self._reject(info, damage)
                self._whole.add(number)
            return path.path
        if not self._fits[number]:
            return None
        try:
            return self._cache.get(path, info.bytes, info.sha256)
        except (FileNotFoundError, ChangedError) as error:
            raise self._reject(info, str(error)) from error

    @contextmanager
    def _damage_rejected(self, number: int) -> Iterator[None]:
        """Turns an error of the block because a shard's file is missing or cut into a DamagedError (`_reject`)."""
        try:
            yield
        except (OSError, ValueError) as error:
            is_damage = isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.EIO)
            if not is_damage:
                raise
            info = self.shards[number]
            raise self._reject(info, f"{self._path(info)}: {one_line(error)}") from error

    def _reject(self, info: ShardInfo, damage: str) -> DamagedError:
        """Removes a damaged shard's manifest, so that its features are computed again. Returns the error to raise."""
        with suppress(OSError):  # the storage may be read-only
            manifest_path(self.folder, info.shard).delete()
        return DamagedError(f"{damage}; the same command computes its features again")


def open_store(folder: StoragePath | Path, settings: FeatureSection) -> FeatureStore:
    """Opens a store with a local cache of the configured size."""
    return FeatureStore(folder, cache_bytes=settings.cache_bytes)


def remove_orphans(folder: StoragePath, min_age_s: float = 3600) -> None:
    """Removes the shards without a manifest and the temporary files that local writers left when they died.

    A file younger than `min_age_s` remains, because its manifest may not be written yet.
    """
    if folder.is_remote:  # Nothing is left on S3: objects are written whole, and a repeated task overwrites its shard.
        return
    manifests = {path.stem for path in (folder.path / "manifest").glob("*.parquet")}
    orphans = [path for path in (folder.path / "shards").glob("*") if path.name.split(".")[0] not in manifests]
    for path in (*orphans, *folder.path.glob(".*.tmp"), *folder.path.glob("manifest/.*.tmp")):
        if path.stat().st_mtime < time.time() - min_age_s:
            path.unlink(missing_ok=True)


def mark_complete(folder: StoragePath, description: Values, rows: int) -> None:
    """Writes the marker file with the number of rows and the description, unless it has this content already."""
    marker = folder / "COMPLETE"
    text = json.dumps({"rows": rows, **description}, indent=1, sort_keys=True).encode()
    if not marker.exists() or marker.read_bytes() != text:
        marker.write_bytes(text)


def content_keys_of(table: pa.Table) -> pa.ChunkedArray:
    """The content keys of the column key. A key of a view is a content key, which has 64 digits, and a suffix."""
    return pc.utf8_slice_codeunits(table["key"], 0, 64)


def write_quarantine(
    folder: StoragePath, dataset: Dataset, unusable: dict[str, str], unreadable: dict[str, str]
) -> None:
    """Replaces the rows of this data set in the quarantine. The rows of other data sets remain.

    unusable: {content key: reason}. unreadable: {URI: reason}.
    """
    before = read_cache(folder / QUARANTINE_FILE, QUARANTINE).to_pylist()
    images = dataset.table.select(["uri", "key"])
    here = set(images["uri"].to_pylist() if before else ())
    rows = {row["uri"]: row for row in before if row["uri"] not in here}
    images = images.set_column(1, "key", content_keys_of(images))
    is_unusable = pc.is_in(images["key"], value_set=pa.array(unusable, pa.string()))
    for row in images.filter(is_unusable).to_pylist():
        rows[row["uri"]] = row | {"reason": unusable[row["key"]]}
    for uri, reason in unreadable.items():
        rows[uri] = {"uri": uri, "key": None, "reason": f"{UNREADABLE}: {reason}"}
    after = sorted(rows.values(), key=lambda row: row["uri"])
    if after != before:
        (folder / QUARANTINE_FILE).write_bytes(to_bytes(pa.Table.from_pylist(after, QUARANTINE)))
