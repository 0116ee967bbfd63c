"""Content keys: which bytes lie behind every image's URI, found without reading files that are known already.

The manifest of a storage keeps URI, size and modification time (on S3: ETag) beside each key; a file whose three are
unchanged is not read again. Cost: one stat an image (on S3: one listing a thousand), one read of each new or changed
one; in memory about 300 bytes an image.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.dataset import Dataset
from pipeline.storage.path import StorageOptions, StoragePath, is_remote, storage_path
from pipeline.storage.s3 import REMOTE
from pipeline.storage.tables import read_table, write_table

MANIFEST = pa.schema([("uri", pa.string()), ("size", pa.int64()), ("tag", pa.string()), ("key", pa.string())])
MAX_BYTES = 256 * 2**20  # no photograph is larger; guards the memory of whoever reads it
_CHUNK = 8192
_MISSING, _UNREADABLE = -1, -2


def take_snapshot(
    dataset: Dataset, manifest: StoragePath | Path, options: StorageOptions = StorageOptions()
) -> tuple[Dataset, dict[str, str]]:
    """The data set with every readable image's content key, and {URI: reason} for those that cannot be read.

    `manifest` (Parquet) is read if it is there, and rewritten in one piece when something in it changed.
    """
    where = storage_path(manifest)
    known = _read(where)
    uris: pa.Array = pc.unique(dataset.table["uri"])
    sizes, tags, troubles = _look(uris, options)
    at = pc.index_in(uris, value_set=known["uri"])
    before = known.take(at)  # rows of nulls for what is new
    same = pc.and_(pc.equal(before["size"], sizes), pc.equal(before["tag"], tags))
    same = pc.fill_null(same, False).combine_chunks()
    keys = pc.if_else(same, before["key"].combine_chunks(), pa.scalar(None, pa.string()))
    fresh = np.flatnonzero(~same.to_numpy(zero_copy_only=False) & (sizes.to_numpy() >= 0))
    if len(fresh):
        found = _hash(uris.take(pa.array(fresh)).to_pylist(), sizes.to_numpy()[fresh], options, troubles)
        values = np.full(len(uris), None, object)
        values[fresh] = found
        keys = pc.coalesce(keys, pa.array(values, pa.string()))
        rows = pa.table([uris, sizes, tags, keys], schema=MANIFEST).filter(pc.is_valid(keys))
        kept = known.filter(pc.invert(pc.is_in(known["uri"], value_set=rows["uri"])))
        if rows.num_rows:
            write_table(where, pa.concat_tables([rows, kept]))
    index = dataset.table.schema.get_field_index("key")
    column = keys.take(pc.index_in(dataset.table["uri"], value_set=uris))
    return Dataset(dataset.table.set_column(index, "key", column)), troubles


def _read(where: StoragePath) -> pa.Table:
    try:
        return read_table(where, MANIFEST)
    except FileNotFoundError:
        return MANIFEST.empty_table()


def _look(uris: pa.Array, options: StorageOptions) -> tuple[pa.Array, pa.Array, dict[str, str]]:
    """Size (negative: cannot be read) and tag of every file, and the troubles."""
    troubles: dict[str, str] = {}
    remote = _listings(uris.filter(pc.starts_with(uris, REMOTE)).to_pylist(), options)

    def look(chunk: pa.Array) -> tuple[pa.Array, pa.Array]:
        sizes, tags = [], []
        for name in chunk.to_pylist():
            size, tag = _MISSING, ""
            if is_remote(name):
                if name in remote:
                    size, tag = remote[name]
                else:
                    troubles[name] = "no such object"
            else:
                try:
                    status = os.stat(name)  # noqa: PTH116 (a Path an image costs more than the stat)
                    size, tag = status.st_size, str(status.st_mtime_ns)
                except OSError as error:
                    troubles[name] = error.strerror or str(error)
            if size > MAX_BYTES:
                troubles[name] = f"larger than {MAX_BYTES} bytes"
                size = _UNREADABLE
            sizes.append(size)
            tags.append(tag)
        return pa.array(sizes, pa.int64()), pa.array(tags, pa.string())  # a tenth of what the lists take

    chunks = [uris.slice(start, _CHUNK) for start in range(0, len(uris), _CHUNK)]
    with ThreadPoolExecutor(max_workers=8) as pool:  # a stat on a network's file system waits
        looked = list(pool.map(look, chunks))
    sizes, tags = (
        pa.chunked_array(list(part), kind).combine_chunks()
        for part, kind in zip(zip(*looked, strict=True) if looked else ((), ()), (pa.int64(), pa.string()), strict=True)
    )
    return sizes, tags, troubles


def _listings(uris: Sequence[str], options: StorageOptions) -> dict[str, tuple[int, str]]:
    """Size and ETag of every object that lies beside an asked one: one listing a folder, not one request an image."""
    folders: dict[str, int] = defaultdict(int)
    for uri in uris:
        folders[uri.rsplit("/", 1)[0]] += 1
    found: dict[str, tuple[int, str]] = {}
    wanted = set(uris)
    for folder in _outermost(sorted(folders)):
        for name, entry in StoragePath(folder, options).list().items():
            uri = f"{folder}/{name}"
            if uri in wanted:
                found[uri] = (entry.size, entry.tag)
    return found


def _outermost(folders: Sequence[str]) -> list[str]:
    """Sorted folders without those that lie in another one: a listing is recursive."""
    kept: list[str] = []
    for folder in folders:
        if not kept or not folder.startswith(kept[-1] + "/"):
            kept.append(folder)
    return kept


def _hash(
    uris: Sequence[str], sizes: np.ndarray, options: StorageOptions, troubles: dict[str, str]
) -> list[str | None]:
    """sha256 of each file's bytes; None, with the reason in `troubles`, where it cannot be read."""

    def key(uri: str) -> str | None:
        try:
            return hashlib.sha256(StoragePath(uri, options).read_bytes()).hexdigest()
        except OSError as error:
            troubles[uri] = error.strerror or str(error)
            return None

    with ThreadPoolExecutor(max_workers=8) as pool:  # reading and hashing release the interpreter's lock
        return list(pool.map(key, uris))
