"""Content keys (sha256 of image files), computed without reading again files that have not changed.

A manifest holds URI, size, tag (modification time, on S3 the ETag) and content key of each image. A file with the same
size and tag is not read. Cost: one stat per image (on S3 one listing request per thousand), one read per new or changed
image, about 300 bytes of memory per image.
"""

from __future__ import annotations

import hashlib
import os
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
MAX_BYTES = 256 * 2**20  # larger files are no photographs; bounds the memory for reading one
_CHUNK = 8192
_UNREADABLE = -1  # as a size


def take_snapshot(
    dataset: Dataset, manifest: StoragePath | Path, options: StorageOptions = StorageOptions()
) -> tuple[Dataset, dict[str, str]]:
    """The data set with the content keys of readable images, and {URI: reason} for those that cannot be read.

    manifest: a Parquet file, used when it exists and rewritten when a file is new or has changed.
    """
    manifest_path = storage_path(manifest)
    known = _read(manifest_path)
    uris: pa.Array = pc.unique(dataset.table["uri"])
    sizes, tags, unreadable = _stat(uris, options)
    previous = known.take(pc.index_in(uris, value_set=known["uri"]))  # null where the URI is new
    same = pc.and_(pc.equal(previous["size"], sizes), pc.equal(previous["tag"], tags))
    same = pc.fill_null(same, False).combine_chunks()
    keys = pc.if_else(same, previous["key"].combine_chunks(), pa.scalar(None, pa.string()))
    changed = np.flatnonzero(~same.to_numpy(zero_copy_only=False) & (sizes.to_numpy() >= 0))
    if len(changed):
        values = np.full(len(uris), None, object)
        values[changed] = _hash(uris.take(pa.array(changed)).to_pylist(), options, unreadable)
        keys = pc.coalesce(keys, pa.array(values, pa.string()))
        rows = pa.table([uris, sizes, tags, keys], schema=MANIFEST).filter(pc.is_valid(keys))
        others = known.filter(pc.invert(pc.is_in(known["uri"], value_set=rows["uri"])))
        if rows.num_rows:
            write_table(manifest_path, pa.concat_tables([rows, others]))
    return dataset.with_keys(keys.take(pc.index_in(dataset.table["uri"], value_set=uris))), unreadable


def _read(manifest: StoragePath) -> pa.Table:
    try:
        return read_table(manifest, MANIFEST)
    except FileNotFoundError:
        return MANIFEST.empty_table()


def _stat(uris: pa.Array, options: StorageOptions) -> tuple[pa.Array, pa.Array, dict[str, str]]:
    """Size (negative when it cannot be read) and tag of every file, and {URI: reason} of those that cannot be read."""
    unreadable: dict[str, str] = {}
    remote = _listings(uris.filter(pc.starts_with(uris, REMOTE)).to_pylist(), options)

    def stat_chunk(chunk: pa.Array) -> tuple[pa.Array, pa.Array]:
        sizes, tags = [], []
        for uri in chunk.to_pylist():
            size, tag = _UNREADABLE, ""
            if is_remote(uri):
                if uri in remote:
                    size, tag = remote[uri]
                else:
                    unreadable[uri] = "no such object"
            else:
                try:
                    status = os.stat(uri)  # noqa: PTH116 (making a Path costs more than the stat)
                    size, tag = status.st_size, str(status.st_mtime_ns)
                except OSError as error:
                    unreadable[uri] = error.strerror or str(error)
            if size > MAX_BYTES:
                unreadable[uri] = f"larger than {MAX_BYTES} bytes"
                size = _UNREADABLE
            sizes.append(size)
            tags.append(tag)
        return pa.array(sizes, pa.int64()), pa.array(tags, pa.string())  # a tenth of the lists' memory

    chunks = [uris.slice(start, _CHUNK) for start in range(0, len(uris), _CHUNK)]
    with ThreadPoolExecutor(max_workers=8) as pool:  # a stat on a network file system waits
        parts = list(pool.map(stat_chunk, chunks))
    sizes, tags = (
        pa.chunked_array(list(part), kind).combine_chunks()
        for part, kind in zip(zip(*parts, strict=True) if parts else ((), ()), (pa.int64(), pa.string()), strict=True)
    )
    return sizes, tags, unreadable


def _listings(uris: Sequence[str], options: StorageOptions) -> dict[str, tuple[int, str]]:
    """Size and ETag of the objects, from one listing per folder instead of one request per image."""
    listed: dict[str, tuple[int, str]] = {}
    wanted = set(uris)
    for folder in _outermost(sorted({uri.rsplit("/", 1)[0] for uri in uris})):
        for name, entry in StoragePath(folder, options).list().items():
            uri = f"{folder}/{name}"
            if uri in wanted:
                listed[uri] = (entry.size, entry.tag)
    return listed


def _outermost(folders: Sequence[str]) -> list[str]:
    """Sorted folders less those inside another one: a listing is recursive."""
    outermost: list[str] = []
    for folder in folders:
        if not outermost or not folder.startswith(outermost[-1] + "/"):
            outermost.append(folder)
    return outermost


def _hash(uris: Sequence[str], options: StorageOptions, unreadable: dict[str, str]) -> list[str | None]:
    """sha256 of each file; None, with the reason added to `unreadable`, where it cannot be read."""

    def content_key(uri: str) -> str | None:
        try:
            return hashlib.sha256(StoragePath(uri, options).read_bytes()).hexdigest()
        except OSError as error:
            unreadable[uri] = error.strerror or str(error)
            return None

    with ThreadPoolExecutor(max_workers=8) as pool:  # reading and hashing release the interpreter's lock
        return list(pool.map(content_key, uris))
