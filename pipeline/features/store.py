"""The feature store: files of features, called shards, in which content keys name the images.

    features/<feature_key>/shards/<name>.npy        (rows, N, C), one dtype
                           shards/<name>.boxes.npy  (rows, N, 4) float32, only for regions
                           manifest/<name>.parquet  key, shard, row, digests, length; written after the shard
                           index.parquet            all manifests in one file, to open a large store faster
                           quarantine.parquet       images without features, with the reason
                           COMPLETE                 JSON: number of rows, and the description of the extraction

Readers ignore a shard without a manifest: its writer died, and a later extraction removes the shard. A shard's name is
a hash of its content keys. So a repeated task writes the same file again, and concurrent extractions do no damage.
The folder is local or on S3. Remote shards are copied to a local cache of limited size.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.sections import FeatureSection
from pipeline.features.shards import ShardInfo, ShardMaps
from pipeline.storage.cache import ShardCache, cache_folder
from pipeline.storage.path import StoragePath, storage_path
from pipeline.storage.tables import read_table, write_table

MANIFEST = pa.schema(
    [
        ("key", pa.string()),  # content key of the image
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("sha256", pa.string()),  # digest of the shard file
        ("bytes", pa.int64()),  # size of the shard file
        ("length", pa.int32()),  # number of regions in the row; null for grids, where every token counts
        ("boxes_sha256", pa.string()),  # digest of the file of boxes; null without boxes
    ]
)
INDEX = "index.parquet"
MAX_LOOSE_PARTS = 16  # the index is rewritten when it lacks more manifests than this
CACHE_BYTES = 50 * 2**30
ContentKeys: TypeAlias = Sequence[str] | pa.Array | pa.ChunkedArray


class Regions(NamedTuple):
    """Features of detected regions; rows are padded with zeros after their `lengths`."""

    features: np.ndarray  # (B, N, C)
    lengths: np.ndarray  # (B,) int64
    boxes: np.ndarray | None  # (B, N, 4) float32, unchanged from the detector


def feature_key(description: dict[str, Any]) -> str:
    """The name of a store: a hash of the description, which contains everything that changes features."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def shard_name(content_keys: Sequence[str]) -> str:
    """The name of the shard of these images: a hash of their content keys."""
    return hashlib.sha256("\n".join(content_keys).encode()).hexdigest()[:32]


def has_shard(folder: StoragePath | Path, content_keys: Sequence[str]) -> bool:
    """Whether a shard of exactly these images exists, so that a repeated task need not compute it again."""
    return (storage_path(folder) / f"manifest/{shard_name(content_keys)}.parquet").exists()


def write_shard(
    folder: StoragePath | Path,
    content_keys: Sequence[str],
    features: np.ndarray,
    lengths: Sequence[int] | None = None,
    boxes: np.ndarray | None = None,
) -> None:
    """Writes a shard of `features` (rows, N, C) for the images with these content keys, then the shard's manifest.

    lengths (rows,), boxes (rows, N, 4): only for regions.
    """
    root, name, count = storage_path(folder), shard_name(content_keys), len(content_keys)
    body, boxes_digest = _npy_bytes(features), None
    (root / f"shards/{name}.npy").write_bytes(body)
    if boxes is not None:
        boxes_body = _npy_bytes(boxes.astype(np.float32))
        boxes_digest = hashlib.sha256(boxes_body).hexdigest()
        (root / f"shards/{name}.boxes.npy").write_bytes(boxes_body)
    rows = {
        "key": list(content_keys),
        "shard": [name] * count,
        "row": range(count),
        "sha256": [hashlib.sha256(body).hexdigest()] * count,
        "bytes": [len(body)] * count,
        "length": lengths if lengths is not None else [None] * count,
        "boxes_sha256": [boxes_digest] * count,
    }
    write_table(root / f"manifest/{name}.parquet", pa.table(rows, schema=MANIFEST))


def _npy_bytes(array: np.ndarray) -> memoryview:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getbuffer()


class FeatureStore:
    """Reads the features of a store. Rows that are written after it is opened are not visible.

    Opening reads the index and the manifests that the index lacks, which takes about 0.3 s for a million rows. Shards
    are opened at first use.
    """

    def __init__(
        self, folder: StoragePath | Path | str, cache: Path | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.folder = storage_path(folder)
        table = _read_manifest(self.folder)
        self.keys: pa.Array = table["key"].combine_chunks()
        encoded = table["shard"].combine_chunks().dictionary_encode()
        self.shards: list[str] = encoded.dictionary.to_pylist()
        self._shard = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        self._row = table["row"].to_numpy()
        self._length = pc.fill_null(table["length"], -1).to_numpy()
        first_rows = pa.array(np.unique(self._shard, return_index=True)[1])
        columns = table.select(["shard", "sha256", "bytes", "boxes_sha256"])
        self._infos = [ShardInfo(**row) for row in columns.take(first_rows).to_pylist()]
        self._positions: dict[str, int] = {}
        shard_cache = ShardCache(cache or cache_folder() / "shards", cache_bytes) if self.folder.is_remote else None
        self._maps = ShardMaps(self.folder / "shards", self._infos, shard_cache)

    def __len__(self) -> int:
        """Number of images in the store."""
        return int(pc.count_distinct(self.keys).as_py()) if len(self.keys) else 0

    def __contains__(self, content_key: str) -> bool:
        return bool(self.contains([content_key])[0])

    def contains(self, content_keys: ContentKeys) -> np.ndarray:
        """Whether the store has each image (len(content_keys),). A call builds a hash table of the store's keys."""
        return pc.is_in(_as_array(content_keys), value_set=self.keys).to_numpy(zero_copy_only=False)

    def locate(self, content_keys: ContentKeys) -> np.ndarray:
        """Positions (len(content_keys),) int64 for `gather_at`, for repeated access to the same images.

        Raises KeyError naming the first key that the store lacks. A call builds a hash table of the store's keys.
        """
        requested = _as_array(content_keys)
        positions = pc.index_in(requested, value_set=self.keys)
        if positions.null_count:
            missing = requested.filter(pc.is_null(positions))[0].as_py()
            raise KeyError(f"features of image {missing} are not in {self.folder}; run the extraction again")
        return positions.to_numpy(zero_copy_only=False).astype(np.int64)

    def gather(self, content_keys: Sequence[str]) -> np.ndarray:
        """Features (len(content_keys), N, C) in the order of the keys. Raises KeyError for a missing key."""
        if not self._positions and len(self.keys):
            self._positions = {key: position for position, key in reversed(list(enumerate(self.keys.to_pylist())))}
        positions = [self._positions.get(key, -1) for key in content_keys]
        if -1 in positions:
            self.locate(content_keys)  # raises KeyError naming the missing key
        return self.gather_at(np.array(positions, np.int64))

    def gather_at(self, positions: np.ndarray) -> np.ndarray:
        """The features that `gather` returns, for positions from `locate`."""
        return self._maps.read(self._shard[positions], self._row[positions])

    def gather_regions(self, content_keys: Sequence[str]) -> Regions:
        """Features with lengths and boxes. A grid's rows have the full length, and its boxes are None."""
        positions = self.locate(content_keys)
        features = self.gather_at(positions)
        lengths, boxes = self.regions_at(positions)
        return Regions(features, np.full(len(positions), features.shape[1]) if lengths is None else lengths, boxes)

    def regions_at(self, positions: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Lengths (len(positions),) int64 and boxes (len(positions), N, 4) of regions, or None."""
        lengths = self._length[positions].astype(np.int64)
        if (lengths < 0).any():
            return None, None
        boxes = None
        if any(self._infos[shard].boxes_sha256 for shard in np.unique(self._shard[positions])):
            boxes = self._maps.read_boxes(self._shard[positions], self._row[positions])
        return lengths, boxes

    def verify(self) -> list[str]:
        """Reads the whole store; returns one sentence for each damaged shard."""
        rows = np.bincount(self._shard, minlength=len(self.shards))
        with ThreadPoolExecutor(4) as pool:  # hashing and reading release the interpreter's lock
            errors = pool.map(self._find_damage, self._infos, rows)
        return [error for error in errors if error]

    def _find_damage(self, info: ShardInfo, rows: int) -> str:
        """A sentence about the damage of one shard; "" when it has none."""
        remedy = f"delete manifest/{info.shard}.parquet and {INDEX} in {self.folder} and extract again"
        files = {f"shards/{info.shard}.npy": info.sha256}
        if info.boxes_sha256:
            files[f"shards/{info.shard}.boxes.npy"] = info.boxes_sha256
        for relative, digest in files.items():
            try:
                data = (self.folder / relative).read_bytes()
            except FileNotFoundError:
                return f"{relative} is missing; {remedy}"
            if hashlib.sha256(data).hexdigest() != digest:
                return f"{relative} does not have the digest in its manifest; {remedy}"
            array = np.load(io.BytesIO(data), allow_pickle=False)
            if len(array) != rows or not np.isfinite(array.sum(dtype=np.float64)):
                return f"{relative} has {len(array)} rows for {rows} images, or values that are not finite; {remedy}"
        return ""


def _as_array(content_keys: ContentKeys) -> pa.Array | pa.ChunkedArray:
    if isinstance(content_keys, pa.Array | pa.ChunkedArray):
        return content_keys
    return pa.array(content_keys, pa.string())


def open_store(folder: StoragePath | Path, settings: FeatureSection) -> FeatureStore:
    """Opens a store with a local cache of the configured size."""
    return FeatureStore(folder, cache_bytes=int(settings.cache_gib * 2**30))


def _read_manifest(folder: StoragePath) -> pa.Table:
    """All rows of the store: those of the index with a manifest, and those that the index lacks."""
    for attempt in range(3):  # another process may remove a manifest between its listing and its reading
        parts = {name.removesuffix(".parquet") for name in (folder / "manifest").list() if name.endswith(".parquet")}
        try:
            index = read_table(folder / INDEX, MANIFEST)
        except FileNotFoundError:
            index = MANIFEST.empty_table()
        if len(index):
            index = index.filter(pc.is_in(index["shard"], value_set=pa.array(sorted(parts), pa.string())))
        loose = sorted(parts - set(pc.unique(index["shard"]).to_pylist()))
        try:
            with ThreadPoolExecutor(8) as pool:
                read = pool.map(lambda name: read_table(folder / f"manifest/{name}.parquet", MANIFEST), loose)
                return pa.concat_tables([index, *read])
        except FileNotFoundError:
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def write_index(folder: StoragePath | Path) -> None:
    """Rewrites the index when it lacks many manifests, or has many that no longer exist.

    A store works without an index, but takes longer to open.
    """
    root = storage_path(folder)
    parts = sum(name.endswith(".parquet") for name in (root / "manifest").list())
    try:
        indexed = len(pc.unique(read_table(root / INDEX, MANIFEST)["shard"]))
    except FileNotFoundError:
        indexed = 0
    if abs(parts - indexed) > MAX_LOOSE_PARTS:
        write_table(root / INDEX, _read_manifest(root))


def remove_orphans(folder: StoragePath | Path, min_age_s: float = 3600) -> int:
    """Removes files that local writers left when they died; returns how many.

    A file younger than `min_age_s` remains: it may be a shard whose manifest is not yet written.
    On S3 nothing is removed, because objects there are never partial and a repeated task overwrites its shard.
    """
    root = storage_path(folder)
    if root.is_remote:
        return 0
    with_manifest = {path.stem for path in (root.path / "manifest").glob("*.parquet")}
    orphans = [
        path
        for path in (root.path / "shards").glob("*")
        if path.suffix == ".tmp" or path.name.split(".")[0] not in with_manifest
    ]
    orphans += [*(root.path / "manifest").glob(".*.tmp"), *root.path.glob(".*.tmp")]
    old = [path for path in orphans if path.stat().st_mtime < time.time() - min_age_s]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def mark_complete(folder: StoragePath | Path, description: dict[str, Any], rows: int) -> None:
    """Writes the marker file with the number of rows and the description, if it differs."""
    marker = storage_path(folder) / "COMPLETE"
    text = json.dumps({"rows": rows, **description}, indent=1, sort_keys=True).encode()
    if not marker.exists() or marker.read_bytes() != text:
        marker.write_bytes(text)
