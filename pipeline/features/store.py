"""The feature store: fixed-stride shards of features, found by image content, read through memory maps.

    features/<feature_key>/shards/<name>.npy        (rows, N, C), one dtype
                           shards/<name>.boxes.npy  (rows, N, 4) float32, only for regions
                           manifest/<name>.parquet  key, shard, row, digests, length; written after its shard is whole
                           index.parquet            all manifests in one file, to open a large store fast; a cache
                           quarantine.parquet       images that gave no features, with the reason
                           COMPLETE                 JSON: rows, and everything that made them

A shard without its manifest does not exist for readers: a writer that died left it, and a later extraction removes
it. A shard's name is a hash of its keys, so that a task done twice writes the same file twice, and two extractions at
once cannot damage each other. The folder is local or on S3; remote shards are staged to a bounded local cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.sections import FeatureSection
from pipeline.features.shards import ShardMaps
from pipeline.storage.cache import ShardCache, cache_folder
from pipeline.storage.path import StoragePath, storage_path
from pipeline.storage.tables import read_table, write_table

MANIFEST = pa.schema(
    [
        ("key", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int32()),
        ("sha256", pa.string()),  # of the shard's file
        ("bytes", pa.int64()),  # its size
        ("length", pa.int32()),  # regions in the row; null where every token counts (grids)
        ("boxes_sha256", pa.string()),  # of the boxes' file; null without boxes
    ]
)
INDEX = "index.parquet"
MAX_LOOSE_PARTS = 16  # manifests outside of the index from which on it is written anew
CACHE_BYTES = 50 * 2**30


class Regions(NamedTuple):
    """Features of detected regions: rows are padded with zeros behind `lengths`."""

    features: np.ndarray  # (B, N, C)
    lengths: np.ndarray  # (B,) int64
    boxes: np.ndarray | None  # (B, N, 4) float32, as the detector gave them


def feature_key(description: dict[str, Any]) -> str:
    """Name of a store: a hash of everything that changes features (backbone, weights, transform, dtypes)."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def shard_name(keys: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:32]


def has_shard(folder: StoragePath | Path, keys: Sequence[str]) -> bool:
    """Whether exactly these rows were written already (a task that is repeated asks before it computes)."""
    return (storage_path(folder) / f"manifest/{shard_name(keys)}.parquet").exists()


def write_shard(
    folder: StoragePath | Path,
    keys: Sequence[str],
    features: np.ndarray,
    lengths: Sequence[int] | None = None,
    boxes: np.ndarray | None = None,
) -> None:
    """Adds `features` (rows, N, C) of the images `keys`: shard first, then the manifest that makes it exist.

    For regions `lengths` (rows,) and, if there are any, `boxes` (rows, N, 4).
    """
    root, name, count = storage_path(folder), shard_name(keys), len(keys)
    body, boxes_digest = _npy(features), None
    (root / f"shards/{name}.npy").write_bytes(body)
    if boxes is not None:
        boxes_body = _npy(boxes.astype(np.float32))
        boxes_digest = hashlib.sha256(boxes_body).hexdigest()
        (root / f"shards/{name}.boxes.npy").write_bytes(boxes_body)
    rows = {
        "key": list(keys),
        "shard": [name] * count,
        "row": range(count),
        "sha256": [hashlib.sha256(body).hexdigest()] * count,
        "bytes": [len(body)] * count,
        "length": lengths if lengths is not None else [None] * count,
        "boxes_sha256": [boxes_digest] * count,
    }
    write_table(root / f"manifest/{name}.parquet", pa.table(rows, schema=MANIFEST))


def _npy(array: np.ndarray) -> memoryview:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getbuffer()


class FeatureStore:
    """Read access to a store as it is at this moment.

    Opening reads the index and the manifests that it lacks: about 0.3 s for a million rows. Shards are mapped (and,
    from S3, staged) when they are first touched.
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
        first = np.unique(self._shard, return_index=True)[1]
        facts = table.select(["sha256", "bytes", "boxes_sha256"]).take(pa.array(first)).to_pylist()
        self.facts = dict(zip(self.shards, facts, strict=True))
        self._positions: dict[str, int] = {}
        staged = ShardCache(cache or cache_folder() / "shards", cache_bytes) if self.folder.is_remote else None
        self._maps = ShardMaps(self.folder / "shards", self.shards, self.facts, staged)

    def __len__(self) -> int:
        """Images in the store."""
        return int(pc.count_distinct(self.keys).as_py()) if len(self.keys) else 0

    def __contains__(self, key: str) -> bool:
        return bool(self.contains([key])[0])

    def contains(self, keys: Sequence[str] | pa.Array) -> np.ndarray:
        """Boolean (len(keys),). Cost: one hash table over the store's keys a call."""
        wanted = keys if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(keys, pa.string())
        return pc.is_in(wanted, value_set=self.keys).to_numpy(zero_copy_only=False)

    def locate(self, keys: Sequence[str] | pa.Array) -> np.ndarray:
        """Positions (len(keys),) int64 for `gather_at`, for whoever asks for the same images often.

        Raises KeyError naming the first key that is not here. Cost: one hash table over the store's keys a call.
        """
        wanted = keys if isinstance(keys, pa.Array | pa.ChunkedArray) else pa.array(keys, pa.string())
        found = pc.index_in(wanted, value_set=self.keys)
        if found.null_count:
            key = wanted.filter(pc.is_null(found))[0].as_py()
            raise KeyError(f"features of image {key} are not in {self.folder}; run the extraction again")
        return found.to_numpy(zero_copy_only=False).astype(np.int64)

    def gather(self, keys: Sequence[str]) -> np.ndarray:
        """Features (len(keys), N, C) of images in the order asked. Raises KeyError naming a key that is not here."""
        if not self._positions and len(self.keys):
            self._positions = {key: at for at, key in reversed(list(enumerate(self.keys.to_pylist())))}
        positions = [self._positions.get(key, -1) for key in keys]
        return self.gather_at(np.array(positions, np.int64) if -1 not in positions else self.locate(keys))

    def gather_at(self, positions: np.ndarray) -> np.ndarray:
        """As `gather`, from positions that `locate` gave. Rows are read in the order of the disk, ahead of the copy."""
        return self._maps.read(self._shard[positions], self._row[positions])

    def gather_regions(self, keys: Sequence[str]) -> Regions:
        """Features with lengths and boxes; a grid's rows have their full length and no boxes."""
        positions = self.locate(keys)
        features = self.gather_at(positions)
        lengths, boxes = self.regions_at(positions)
        return Regions(features, np.full(len(keys), features.shape[1]) if lengths is None else lengths, boxes)

    def regions_at(self, positions: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Lengths (len(positions),) int64 and boxes (len(positions), N, 4) of regions; None where there are none."""
        lengths = self._length[positions].astype(np.int64)
        if (lengths < 0).any():
            return None, None
        boxes = None
        if any(self.facts[self.shards[shard]]["boxes_sha256"] for shard in np.unique(self._shard[positions])):
            boxes = self._maps.read_boxes(self._shard[positions], self._row[positions])
        return lengths, boxes

    def verify(self) -> list[str]:
        """Reads everything back; a sentence for each shard that is damaged. Cost: one read of the whole store."""
        rows = np.bincount(self._shard, minlength=len(self.shards))
        with ThreadPoolExecutor(4) as pool:  # hashing and reading release the interpreter's lock
            troubles = pool.map(self._damage, self.shards, rows)
        return [trouble for trouble in troubles if trouble]

    def _damage(self, name: str, rows: int) -> str:
        remedy = f"delete manifest/{name}.parquet and {INDEX} in {self.folder} and extract again"
        facts = self.facts[name]
        files = {f"shards/{name}.npy": facts["sha256"]}
        if facts["boxes_sha256"]:
            files[f"shards/{name}.boxes.npy"] = facts["boxes_sha256"]
        for relative, digest in files.items():
            try:
                data = (self.folder / relative).read_bytes()
            except FileNotFoundError:
                return f"{relative} is missing; {remedy}"
            if hashlib.sha256(data).hexdigest() != digest:
                return f"{relative} does not have the digest that its manifest names; {remedy}"
            array = np.load(io.BytesIO(data), allow_pickle=False)
            if len(array) != rows or not np.isfinite(array.sum(dtype=np.float64)):
                return f"{relative} has {len(array)} rows for {rows} images, or values that are not finite; {remedy}"
        return ""


def open_store(folder: StoragePath | Path, settings: FeatureSection) -> FeatureStore:
    """A store with the local cache that a configuration allows."""
    return FeatureStore(folder, cache_bytes=int(settings.cache_gib * 2**30))


def _read_manifest(folder: StoragePath) -> pa.Table:
    """All rows of the store: the index, less shards whose manifest is gone, and the manifests that it lacks."""
    for attempt in range(3):
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
            if attempt == 2:  # somebody removes manifests while they are read
                raise
    raise AssertionError("unreachable")


def write_index(folder: StoragePath | Path) -> None:
    """Brings the index up to date when many manifests are not in it. It is a cache: losing it costs time only."""
    root = storage_path(folder)
    parts = sum(name.endswith(".parquet") for name in (root / "manifest").list())
    try:
        indexed = len(pc.unique(read_table(root / INDEX, MANIFEST)["shard"]))
    except FileNotFoundError:
        indexed = 0
    if abs(parts - indexed) > MAX_LOOSE_PARTS:
        write_table(root / INDEX, _read_manifest(root))


def remove_orphans(folder: StoragePath | Path, min_age_s: float = 3600) -> int:
    """Removes what local writers that died left behind. Returns how many files.

    A file younger than `min_age_s` may be another extraction's shard on its way to its manifest, and stays. On S3 no
    partial object exists; a shard without its manifest is taken over by the task that is repeated.
    """
    root = storage_path(folder)
    if root.is_remote:
        return 0
    named = {path.stem for path in (root.path / "manifest").glob("*.parquet")}
    orphans = [
        path
        for path in (root.path / "shards").glob("*")
        if path.suffix == ".tmp" or path.name.split(".")[0] not in named
    ]
    orphans += [*(root.path / "manifest").glob(".*.tmp"), *root.path.glob(".*.tmp")]
    old = [path for path in orphans if path.stat().st_mtime < time.time() - min_age_s]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def mark_complete(folder: StoragePath | Path, description: dict[str, Any], rows: int) -> None:
    """The marker that says what the store holds and how it was made; left alone when it says so already."""
    marker = storage_path(folder) / "COMPLETE"
    text = json.dumps({"rows": rows, **description}, indent=1, sort_keys=True).encode()
    if not marker.exists() or marker.read_bytes() != text:
        marker.write_bytes(text)
