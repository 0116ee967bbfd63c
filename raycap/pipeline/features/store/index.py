"""The index of a feature store: which images each shard has, and where an image is among many millions.

`manifest/<shard>.parquet` is written after its shard, which does not exist without it. Each file of `index/` has the
manifests of up to SHARDS_PER_PART shards, so that a store of millions of images opens with few requests. The index is
a cache: rows of shards without a manifest do not count, and manifests that it lacks are read. In memory, an image is
found by its key with 16 bytes per key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.features.store.shards import INDEX, ShardInfo
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import read_cache, write_table

_SLICE = 2**16  # keys that are decoded at a time
_HEX = "^[0-9a-f]{64}$"  # a content key; other keys are those of views and of regions
_ODD = np.uint64(0x9E3779B97F4A7C15)  # an odd number with random bits
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


def key_digests(keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A number of 128 bits for each key: (len(keys), 2) uint64. A null has that of the empty key.

    Two different ones of 10^12 images have the same number with a probability of 1.5e-15. It takes 0.2 s for a million
    content keys, and 1 s for a million other keys.
    """
    chunks = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
    result = np.empty((len(keys), 2), np.uint64)
    end = 0
    for chunk in chunks:
        for start in range(0, len(chunk), _SLICE):
            part = pc.fill_null(chunk.slice(start, _SLICE), "")
            is_hex = pc.match_substring_regex(part, _HEX)
            mask = is_hex.to_numpy(zero_copy_only=False)
            begin, end = end, end + len(part)
            result[begin:end][mask] = _decoded(part.filter(is_hex))
            result[begin:end][~mask] = _hashed(part.filter(pc.invert(is_hex)))
    return result


def _decoded(keys: pa.Array) -> np.ndarray:
    """The digests of content keys, which are random bits: both halves of the 256 are combined."""
    if not len(keys):
        return np.empty((0, 2), np.uint64)
    digits = np.frombuffer(keys.buffers()[2], np.uint8, len(keys) * 64).reshape(-1, 64)
    digits = (digits & 15) + 9 * (digits >> 6)
    words = np.ascontiguousarray(digits[:, ::2] << 4 | digits[:, 1::2]).view(">u8").astype(np.uint64)
    return words[:, :2] ^ (words[:, 2:] * _ODD)


def _hashed(keys: pa.Array) -> np.ndarray:
    """The digests of keys of any form."""
    digests = b"".join(hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys.to_pylist())
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def first_of_each(digests: np.ndarray) -> np.ndarray:
    """Whether each of these digests (D, 2) is not among those before it: bools (D,)."""
    table, order = KeyTable.sort(digests)
    result = np.zeros(len(digests), bool)
    result[order[table.is_first()]] = True
    return result


class KeyTable:
    """Keys sorted by their digests (K, 2), which are all that it has of them. A key may be there several times.

    Its arrays are views of shared memory when Ray passes it on.
    """

    def __init__(self, high: np.ndarray, low: np.ndarray) -> None:
        """high, low: the columns of sorted digests."""
        self.high, self.low = high, low

    @classmethod
    def sort(cls, digests: np.ndarray) -> tuple[KeyTable, np.ndarray]:
        """The table of digests (K, 2), and the order (K,) in which it has them; equal ones stay as they are."""
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        return cls(digests[order, 0], digests[order, 1]), order

    def __len__(self) -> int:
        return len(self.high)

    def digests(self) -> np.ndarray:
        """A copy of the digests (K, 2)."""
        return np.stack([self.high, self.low], axis=1)

    def is_first(self) -> np.ndarray:
        """For each place, whether no earlier one has the same key: bools (K,)."""
        is_first = np.ones(len(self), bool)
        is_first[1:] = (self.high[1:] != self.high[:-1]) | (self.low[1:] != self.low[:-1])
        return is_first

    def find(self, digests: np.ndarray) -> np.ndarray:
        """The first place (D,) int64 of each of these digests (D, 2); -1 for one that is not there."""
        if not len(self):
            return np.full(len(digests), -1)
        high, low = digests[:, 0], digests[:, 1]
        places = np.searchsorted(self.high, high)
        while True:  # ends after one turn, unless digests agree in 64 bits
            inside = np.minimum(places, len(self) - 1)
            is_close = (self.high[inside] == high) & (places < len(self))
            is_other = is_close & (self.low[inside] != low)
            if not is_other.any():
                return np.where(is_close, places, -1)
            places[is_other] += 1

    def contains(self, digests: np.ndarray) -> np.ndarray:
        """Whether each of these digests (D, 2) is there: bools (D,)."""
        return self.find(digests) >= 0


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

    It reads the index, and manifests of at most SHARDS_PER_PART shards besides those that the index lacks.
    """
    shards = _shards_with_manifest(folder)
    parts = {path.uri: set(pc.unique(read_cache(path, MANIFEST)["shard"]).to_pylist()) for path in _parts(folder)}
    indexed = set[str]().union(*parts.values())
    if len(shards ^ indexed) <= MAX_LOOSE:
        return
    full = {uri for uri, names in parts.items() if len(names & shards) >= SHARDS_PER_PART}
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
    return [folder / INDEX / name for name in names]


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
