"""The feature store: files of features, called shards, in which content keys name the images.

    features/<feature_key>/shards/<name>.npy        (rows, N, C), one dtype
                           shards/<name>.boxes.npy  (rows, N, 4) float32, only for regions
                           manifest/<name>.parquet  key, shard, row, digests, length; written after the shard
                           index.parquet            all manifests in one file, to open a large store faster
                           quarantine.parquet       images without features, with the reason
                           COMPLETE                 JSON: number of rows, and the description of the extraction

Readers ignore a shard without a manifest, because its writer died. A later extraction removes the shard.
A shard's name is a hash of its content keys, so that a repeated task or a concurrent extraction writes the same file.
The folder is local or on S3. Remote shards are copied to a local cache of limited size. A shard is compared with its
digest at its first use on a machine. The manifest of a damaged shard is removed, so that an extraction computes its
features again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.sections import FeatureSection
from pipeline.errors import DamagedError
from pipeline.features.read_ahead import ReadAhead
from pipeline.features.shards import ShardInfo, ShardMaps
from pipeline.storage.file_cache import shard_cache
from pipeline.storage.path import StoragePath, storage_path
from pipeline.storage.tables import read_cache, write_table

logger = logging.getLogger(__name__)

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
KEY_BEGIN = "S16"  # numpy's type for the begin of a key
MAX_LOOSE_PARTS = 16  # `write_index` rewrites the index when more manifests than this were added or removed


def feature_key(description: dict[str, Any]) -> str:
    """The name of a store: a hash of the description, which contains everything that changes features."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def shard_name(content_keys: Sequence[str]) -> str:
    """The name of the shard of these images: a hash of their keys."""
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
    files = {f"shards/{name}.npy": features}
    if boxes is not None:
        files[f"shards/{name}.boxes.npy"] = boxes.astype(np.float32)
    with ThreadPoolExecutor(len(files)) as pool:  # uploads at the same time
        written = list(pool.map(_write_array, [root / file for file in files], files.values()))
    (size, digest), boxes_digest = written[0], written[1][1] if boxes is not None else None
    rows = {
        "key": list(content_keys),
        "shard": [name] * count,
        "row": range(count),
        "sha256": [digest] * count,
        "bytes": [size] * count,
        "length": [None] * count if lengths is None else lengths,
        "boxes_sha256": [boxes_digest] * count,
    }
    write_table(root / f"manifest/{name}.parquet", pa.table(rows, schema=MANIFEST))


def _write_array(path: StoragePath, array: np.ndarray) -> tuple[int, str]:
    """Writes an .npy file. Returns its size and digest."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    data = buffer.getbuffer()
    path.write_bytes(data)
    return len(data), hashlib.sha256(data).hexdigest()


class FeatureStore:
    """Reads the features of a store. Rows that are written after it is opened are not visible.

    Opening reads the index and the manifests that the index lacks, which takes about 0.3 s for a million rows. Shards
    are opened at first use.
    """

    def __init__(
        self,
        folder: StoragePath | Path | str,
        cache: Path | None = None,
        cache_bytes: int | None = None,
        *,
        by_shards: bool = False,
    ) -> None:
        """cache: the folder for copies of remote shards. cache_bytes: its limit; None: half of the free space.

        by_shards: copy only the shards that `read_ahead` asks for (`ShardMaps`).
        """
        self.folder = storage_path(folder)
        table = _read_manifest(self.folder)
        self.keys: pa.Array = table["key"].combine_chunks()
        shards = table["shard"].combine_chunks().dictionary_encode().indices
        # By position: the number of the image's shard, its row there, and its number of regions (-1 for a grid).
        self._shard = shards.to_numpy(zero_copy_only=False).astype(np.int32)
        self._row = table["row"].to_numpy()
        self._length = pc.fill_null(table["length"], -1).to_numpy()
        first_rows = pa.array(np.unique(self._shard, return_index=True)[1])
        columns = table.select(["shard", "sha256", "bytes", "boxes_sha256"])
        self.shards = [ShardInfo(**row) for row in columns.take(first_rows).to_pylist()]
        local = shard_cache(cache_bytes, cache) if self.folder.is_remote else None
        self._maps = ShardMaps(self.folder / "shards", self.shards, local, by_shards=by_shards)

    def __len__(self) -> int:
        """Number of images in the store."""
        return int(pc.count_distinct(self.keys).as_py()) if len(self.keys) else 0

    def contains(self, content_keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """For each image, whether the store has it: bools (len(content_keys),). A call hashes all keys of the store."""
        return pc.is_in(content_keys, value_set=self.keys).to_numpy(zero_copy_only=False)

    def key_begins(self) -> np.ndarray:
        """The first 16 characters of each key, sorted, of type KEY_BEGIN: 16 bytes per image.

        Two images of a billion have the same with a probability of 3 %.
        """
        begins = pc.utf8_slice_codeunits(self.keys, 0, 16)
        if not len(begins):
            return np.zeros(0, KEY_BEGIN)
        return np.sort(np.concatenate([np.array(each.to_pylist(), KEY_BEGIN) for each in _slices(begins)]))

    def locate(self, content_keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """The positions (len(content_keys),) int64 of images, by which the methods below read them.

        Raises DamagedError naming the first key that the store lacks. A call builds a hash table of the store's keys.
        """
        positions = pc.index_in(content_keys, value_set=self.keys)
        if positions.null_count:
            missing = content_keys.filter(pc.is_null(positions))[0].as_py()
            raise DamagedError(f"features of image {missing} are not in {self.folder}; run the extraction again")
        return positions.to_numpy(zero_copy_only=False).astype(np.int64)

    def shards_at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers (len(positions),) int32 of the shards that have the images at these positions."""
        return self._shard[positions]

    def read_ahead(
        self, shards_at: Callable[[int], np.ndarray], start: int, stop: int
    ) -> AbstractContextManager[ReadAhead | None]:
        """Copies the shards of training's steps to the cache in the context (`ReadAhead`). A local store needs none.

        The training workers on a machine, whose number LOCAL_WORLD_SIZE has, share the cache equally.
        """
        if self._maps.cache is None:
            return nullcontext()
        budget = self._maps.cache.limit // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ReadAhead(self._maps, shards_at, start, stop, budget)

    def gather_at(self, positions: np.ndarray) -> np.ndarray:
        """Features (len(positions), N, C). An image with fewer than N regions is filled up with zeros."""
        return self._maps.read(self._shard[positions], self._row[positions])

    def regions_at(self, positions: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Lengths (len(positions),) int64 and boxes (len(positions), N, 4) float32 of regions.

        Both are None for grids. The boxes are also None when the detector's file had none.
        """
        lengths = self._length[positions].astype(np.int64)
        if (lengths < 0).any():
            return None, None
        if not any(self.shards[shard].boxes_sha256 for shard in np.unique(self._shard[positions])):
            return lengths, None
        return lengths, self._maps.read_boxes(self._shard[positions], self._row[positions])

    def damaged(self, content_keys: pa.Array | pa.ChunkedArray) -> dict[str, str]:
        """{shard: a sentence about its damage} for the shards with features of these images. See `ShardMaps.damages`.

        Unlike `verify` it reads a local shard only once per machine.
        """
        numbers = np.unique(self._shard[pc.is_in(self.keys, value_set=content_keys).to_numpy(zero_copy_only=False)])
        return {self.shards[number].shard: text for number, text in self._maps.damages(numbers.tolist()).items()}

    def verify(self) -> list[str]:
        """Reads the whole store; returns one sentence for each damaged shard."""
        rows = np.bincount(self._shard, minlength=len(self.shards))
        with ThreadPoolExecutor(4) as pool:  # hashing and reading release the interpreter's lock
            return [damage for damage in pool.map(self._find_damage, self.shards, rows) if damage]

    def _find_damage(self, info: ShardInfo, rows: int) -> str:
        """A sentence about the damage of one shard; "" for an intact shard. rows: its rows in the manifest."""
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
            # A sum in float64 cannot overflow, so that it is finite only if every value is. It needs no second array.
            if len(array) != rows or not np.isfinite(array.sum(dtype=np.float64)):
                return f"{relative} has {len(array)} rows for {rows} images, or values that are not finite; {remedy}"
        return ""


def _slices(array: pa.Array) -> Iterator[pa.Array]:
    """Parts of an array whose items may be Python objects at the same time."""
    return (array.slice(start, 100_000) for start in range(0, len(array), 100_000))


def open_store(folder: StoragePath | Path, settings: FeatureSection, *, by_shards: bool = False) -> FeatureStore:
    """Opens a store with a local cache of the configured size. by_shards: see `FeatureStore`."""
    return FeatureStore(folder, cache_bytes=settings.cache_bytes, by_shards=by_shards)


def _shards_with_manifest(folder: StoragePath) -> set[str]:
    return {name.removesuffix(".parquet") for name in (folder / "manifest").list() if name.endswith(".parquet")}


def _read_manifest(folder: StoragePath) -> pa.Table:
    """The manifest rows of all images in the store.

    They come from the index, without shards whose manifest was removed, and from manifests that the index lacks. A
    manifest that is damaged, or that another process removes meanwhile, counts as missing.
    """
    shards = _shards_with_manifest(folder)
    index = read_cache(folder / INDEX, MANIFEST)
    index = index.filter(pc.is_in(index["shard"], value_set=pa.array(sorted(shards), pa.string())))
    not_indexed = sorted(shards - set(pc.unique(index["shard"]).to_pylist()))
    with ThreadPoolExecutor(8) as pool:
        tables = pool.map(lambda name: read_cache(folder / f"manifest/{name}.parquet", MANIFEST), not_indexed)
        return pa.concat_tables([index, *tables])


def write_index(folder: StoragePath | Path) -> None:
    """Rewrites the index if it has become old. A store works without an index, but takes longer to open."""
    root = storage_path(folder)
    num_indexed = len(pc.unique(read_cache(root / INDEX, MANIFEST)["shard"]))
    if abs(len(_shards_with_manifest(root)) - num_indexed) > MAX_LOOSE_PARTS:
        write_table(root / INDEX, _read_manifest(root))


def remove_orphans(folder: StoragePath | Path, min_age_s: float = 3600) -> int:
    """Removes files that local writers left when they died; returns how many.

    A file younger than `min_age_s` remains: it may be a shard whose manifest is not yet written.
    On S3 nothing is removed, because S3 has no partial objects and a repeated task overwrites its shard.
    """
    root = storage_path(folder)
    if root.is_remote:
        return 0
    with_manifest = {path.stem for path in (root.path / "manifest").glob("*.parquet")}
    shards = (root.path / "shards").glob("*")
    orphans = [path for path in shards if path.suffix == ".tmp" or path.name.split(".")[0] not in with_manifest]
    orphans += [*(root.path / "manifest").glob(".*.tmp"), *root.path.glob(".*.tmp")]
    old = [path for path in orphans if path.stat().st_mtime < time.time() - min_age_s]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def remove_damaged(folder: StoragePath | Path, content_keys: pa.Array | pa.ChunkedArray) -> None:
    """Removes the manifests of damaged shards with features of these images, so that they are computed again."""
    root = storage_path(folder)
    for shard, damage in FeatureStore(root).damaged(content_keys).items():
        logger.warning(f"damaged   {damage}; its features are computed again")
        (root / f"manifest/{shard}.parquet").delete()


def mark_complete(folder: StoragePath | Path, description: dict[str, Any], rows: int) -> None:
    """Writes the marker file with the number of rows and the description, unless it has this content already."""
    marker = storage_path(folder) / "COMPLETE"
    text = json.dumps({"rows": rows, **description}, indent=1, sort_keys=True).encode()
    if not marker.exists() or marker.read_bytes() != text:
        marker.write_bytes(text)
