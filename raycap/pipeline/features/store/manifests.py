"""The manifests of a feature store's shards: which images a shard has, and its digests.

`manifest/<shard>.parquet` is written after its shard, which does not exist without it. Each file of `index/` has the
manifests of up to SHARDS_PER_PART shards, so that a store of millions of images opens with few requests. The index is
a cache: rows of shards without a manifest do not count, and manifests that it lacks are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.features.store.key_table import KeyTable, key_digests
from raycap.pipeline.features.store.shards import INDEX, ONE_FILE, ShardInfo
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import read_cache, write_table

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
SHARDS_PER_PART = 1024
MAX_LOOSE = 16  # `write_index` adds to the index when more manifests than this were added or removed
_NUM_READS = 32  # manifests that are read at the same time


def manifest_path(folder: StoragePath, shard: str) -> StoragePath:
    """The file of a shard's manifest."""
    return folder / f"manifest/{shard}.parquet"


def read_manifests(folder: StoragePath) -> Iterator[pa.Table]:
    """The manifest rows of all images in a store, those of at most SHARDS_PER_PART shards at a time.

    No shard occurs twice. A manifest that is damaged, or that another process removes meanwhile, counts as missing.
    """
    shards = _shards_with_manifest(folder)
    for path in _parts(folder):
        table = read_cache(path, MANIFEST)
        table = table.filter(pc.is_in(table["shard"], value_set=pa.array(list(shards), pa.string())))
        shards -= set(pc.unique(table["shard"]).to_pylist())
        yield table
    yield from _loose_manifests(folder, shards)


def _loose_manifests(folder: StoragePath, shards: Collection[str]) -> Iterator[pa.Table]:
    """The rows of these shards' own manifests, for at most SHARDS_PER_PART shards at a time."""
    names = sorted(shards)
    with ThreadPoolExecutor(_NUM_READS) as pool:
        for start in range(0, len(names), SHARDS_PER_PART):
            paths = [manifest_path(folder, name) for name in names[start : start + SHARDS_PER_PART]]
            yield pa.concat_tables(pool.map(lambda path: read_cache(path, MANIFEST), paths))


def write_index(folder: StoragePath) -> None:
    """Adds manifests to the index if it lacks many. Full parts of it are not written again.

    It reads the index, and manifests of at most SHARDS_PER_PART shards besides those that the index lacks. The only
    file of an earlier version is replaced by parts, for which all manifests are read once.
    """
    shards = _shards_with_manifest(folder)
    parts = {path.uri: set(pc.unique(read_cache(path, MANIFEST)["shard"]).to_pylist()) for path in _parts(folder)}
    indexed = set[str]().union(*parts.values())
    if len(shards ^ indexed) <= MAX_LOOSE:
        return
    old = (folder / ONE_FILE).uri
    full = {uri for uri, names in parts.items() if uri != old and len(names & shards) >= SHARDS_PER_PART}
    for table in _loose_manifests(folder, shards.difference(*(parts[uri] for uri in full))):
        names = pc.unique(table["shard"]).to_pylist()
        path = folder / f"{INDEX}/{hashlib.sha256(' '.join(names).encode()).hexdigest()[:32]}.parquet"
        write_table(path, table)
        full.add(path.uri)
    for path in _parts(folder):
        if path.uri in parts and path.uri not in full:
            path.delete()


def _shards_with_manifest(folder: StoragePath) -> set[str]:
    return {name.removesuffix(".parquet") for name in (folder / "manifest").list() if name.endswith(".parquet")}


def _parts(folder: StoragePath) -> list[StoragePath]:
    """The files of the index."""
    names = sorted(name for name in (folder / INDEX).list() if name.endswith(".parquet"))
    old = folder / ONE_FILE
    return [*([old] if old.exists() else []), *(folder / INDEX / name for name in names)]


@dataclass(frozen=True)
class ManifestRows:
    """All images of a store, sorted by the digests of their keys: 22 bytes of memory per image of a grid.

    keys: their table. shard (K,) int32: the number of the image's shard in `shards`. row (K,): its row there. length
    (K,): its number of regions; None for grids.
    """

    keys: KeyTable
    shard: np.ndarray
    row: np.ndarray
    length: np.ndarray | None
    shards: list[ShardInfo]

    @classmethod
    def read(cls, folder: StoragePath) -> ManifestRows:
        """Those of a store. Meanwhile it takes some 60 bytes per image. Sorting takes 0.3 s for a million."""
        shards: list[ShardInfo] = []
        digests, numbers = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int32)]
        rows, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for table in read_manifests(folder):
            encoded = table["shard"].dictionary_encode().chunks  # they share a dictionary
            of_image = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in encoded)])
            first_rows = np.unique(of_image, return_index=True)[1]
            digests.append(key_digests(table["key"]))
            numbers.append(of_image.astype(np.int32) + np.int32(len(shards)))
            rows.append(table["row"].to_numpy())
            lengths.append(pc.fill_null(table["length"], -1).to_numpy())
            columns = table.select(["shard", "sha256", "bytes", "boxes_sha256"]).take(first_rows)
            shards += [ShardInfo(**row) for row in columns.to_pylist()]
        keys, order = KeyTable.sort(_joined(digests))
        shard, row, length = (_joined(each)[order] for each in (numbers, rows, lengths))
        row = row.astype(np.uint16 if not len(row) or row.max() < 2**16 else np.int32)
        return cls(keys, shard, row, length if (length >= 0).any() else None, shards)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The parts as one array. The list is emptied, which frees their memory."""
    result = np.concatenate(parts)
    parts.clear()
    return result
