"""Content keys: the sha256 of every image file. A file that has not changed is not read again.

The files are read by threads of this process, or by an extraction, whose tasks hash the bytes that they read anyway.

A manifest holds the URI, size, tag and content key of each image; the tag is the modification time, or the ETag on S3.
A file with the same size and tag as in the manifest counts as unchanged. Images in an archive or table have the size
and tag of this file. The cost is one stat per file and one read per new or changed image. On S3 the sizes and tags of a
thousand files come from one listing request. The manifest is also written while images are read, so that a kill or an
outage loses little of this work.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annotations.location import PARTS, ImageLocation, forget_pages
from pipeline.data.dataset import Dataset
from pipeline.data.images import MAX_BYTES, read_image_file, reason_of
from pipeline.runtime.progress import progress
from pipeline.storage.path import StorageOptions, StoragePath, is_remote, storage_path
from pipeline.storage.s3 import REMOTE, Entry, StorageError
from pipeline.storage.tables import read_cache, write_table

MANIFEST = pa.schema([("uri", pa.string()), ("size", pa.int64()), ("tag", pa.string()), ("key", pa.string())])
_URIS_PER_TASK = 8192  # files whose sizes a thread looks up in one task
_UNREADABLE_SIZE = -1  # replaces the size of a file that cannot be read
_NUM_THREADS = 8
_URIS_PER_SLICE = 1000  # files that are hashed between two looks at the clock
# The manifest is written once a minute, and so seldom that the writes take a twentieth of the time.
_WRITE_EVERY_S, _WRITE_SHARE = 60.0, 1 / 20
# A listing ends after this many objects plus ten per image: one image may be in a bucket of a billion objects.
_LISTED_OBJECTS = 1000


class HashedFiles(NamedTuple):
    """Some files that were read. numbers: (R,) int64, their places in the argument of `HashFiles`, in any order.

    keys: their sha256, null for a file that cannot be read. reasons: why, as {URI: reason}.
    """

    numbers: np.ndarray
    keys: pa.Array
    reasons: dict[str, str]


# Reads and hashes the files at URIs, each once. Raises StorageError when the storage is out of order.
HashFiles = Callable[[pa.Array, StorageOptions], Iterator[HashedFiles]]


def take_snapshot(
    dataset: Dataset,
    manifest: StoragePath | Path,
    options: StorageOptions = StorageOptions(),
    hash_files: HashFiles | None = None,
) -> tuple[Dataset, dict[str, str]]:
    """The data set with the content keys of readable images, and {URI: reason} for those that cannot be read.

    manifest: a Parquet file, used when it exists and rewritten when a file is new or has changed. hash_files: what
    reads new and changed files; None for threads of this process. The cost is about 250 bytes of memory per image.
    Raises StorageError when the storage is out of order.
    """
    forget_pages()
    manifest_path = storage_path(manifest)
    stored = read_cache(manifest_path, MANIFEST)
    uris: pa.Array = pc.unique(dataset.table["uri"])
    sizes, tags, unreadable = _read_sizes(uris, options)
    previous = stored.take(pc.index_in(uris, value_set=stored["uri"]))  # rows of nulls for new URIs
    unchanged = pc.and_(pc.equal(previous["size"], sizes), pc.equal(previous["tag"], tags))
    unchanged = pc.fill_null(unchanged, False).combine_chunks()
    keys = pc.if_else(unchanged, previous["key"].combine_chunks(), pa.scalar(None, pa.string()))
    changed = np.flatnonzero(~unchanged.to_numpy(zero_copy_only=False) & (sizes.to_numpy() >= 0))
    if len(changed):
        files = pa.table([uris, sizes, tags, keys], schema=MANIFEST)
        parts = (hash_files or hash_with_threads)(uris.take(pa.array(changed)), options)
        keys = _hash_changed(files, changed, parts, unreadable, lambda rows: _write(manifest_path, rows, stored))
    return dataset.with_column("key", keys.take(pc.index_in(dataset.table["uri"], value_set=uris))), unreadable


def _read_sizes(uris: pa.Array, options: StorageOptions) -> tuple[pa.Array, pa.Array, dict[str, str]]:
    """The size and tag of each image's file, and {URI: reason} of unreadable images, whose size is _UNREADABLE_SIZE."""
    is_in_file = pc.or_(*(pc.starts_with(uris, begin) for begin in PARTS))
    files = _files_of(uris) if pc.any(is_in_file).as_py() else uris
    distinct = uris if files is uris else pc.unique(files)
    sizes, tags, reasons = _read_entries(distinct, options)
    if len(distinct) < len(files):
        rows = pc.index_in(files, value_set=distinct)
        sizes, tags = sizes.take(rows), tags.take(rows)
    is_large = pc.and_(pc.greater(sizes, MAX_BYTES), pc.invert(is_in_file))  # of a part, `read_bytes` knows the size
    unreadable = dict.fromkeys(uris.filter(is_large).to_pylist(), f"larger than {MAX_BYTES} bytes")
    if reasons:
        is_unreadable = pc.equal(sizes, _UNREADABLE_SIZE)
        names = zip(uris.filter(is_unreadable).to_pylist(), files.filter(is_unreadable).to_pylist(), strict=True)
        unreadable |= {uri: reasons[file] for uri, file in names}
    return pc.if_else(is_large, _UNREADABLE_SIZE, sizes), tags, unreadable


def _files_of(uris: pa.Array) -> pa.Array:
    """The path or URI of each image's file."""
    chunks = (uris.slice(start, _URIS_PER_TASK).to_pylist() for start in range(0, len(uris), _URIS_PER_TASK))
    files = [pa.array([ImageLocation.parse(uri).file.uri for uri in chunk], pa.string()) for chunk in chunks]
    return pa.concat_arrays(files)


def _read_entries(files: pa.Array, options: StorageOptions) -> tuple[pa.Array, pa.Array, dict[str, str]]:
    """The size and tag of every file, and {path or URI: reason} of missing ones, whose size is _UNREADABLE_SIZE."""
    reasons: dict[str, str] = {}
    remote_objects = _list_remote(files.filter(pc.starts_with(files, REMOTE)).to_pylist(), options)

    def read_entry(file: str) -> tuple[int, str]:
        """The size in bytes and the tag of one file."""
        try:
            if is_remote(file):
                return remote_objects[file].size, remote_objects[file].tag
            status = os.stat(file)  # noqa: PTH116 (making a Path costs more than the stat)
            return status.st_size, str(status.st_mtime_ns)
        except KeyError:
            reasons[file] = "no such object"
        except OSError as error:
            reasons[file] = reason_of(error)
        return _UNREADABLE_SIZE, ""

    def read_chunk(chunk: pa.Array) -> tuple[pa.Array, pa.Array]:
        sizes, tags = zip(*map(read_entry, chunk.to_pylist()), strict=True)
        # Arrays need a tenth of the memory of the lists.
        return pa.array(sizes, pa.int64()), pa.array(tags, pa.string())

    chunks = [files.slice(start, _URIS_PER_TASK) for start in range(0, len(files), _URIS_PER_TASK)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # threads, because a stat on a network file system mostly waits
        parts = list(pool.map(read_chunk, chunks))
    sizes = pa.chunked_array([chunk_sizes for chunk_sizes, _ in parts], pa.int64()).combine_chunks()
    tags = pa.chunked_array([chunk_tags for _, chunk_tags in parts], pa.string()).combine_chunks()
    return sizes, tags, reasons


def _list_remote(uris: Sequence[str], options: StorageOptions) -> dict[str, Entry]:
    """The size and tag of those objects that exist, by URI: from one listing per folder, not one request per image.

    The listing of a folder with n images ends after 1 + n / 100 requests, of 1000 objects each. If more than nine of
    ten objects are no images of the data set, some images are not found by then; each of these is one more request.
    """
    wanted, found = set(uris), dict[str, Entry]()
    images_in: dict[str, int] = {}
    folder = ""
    for own_folder, count in sorted(Counter(uri.rsplit("/", 1)[0] for uri in uris).items()):
        if not folder or not own_folder.startswith(f"{folder}/"):  # a listing includes the folders below
            folder = own_folder
        images_in[folder] = images_in.get(folder, 0) + count
    unfinished: list[str] = []
    for folder, count in images_in.items():
        left = _LISTED_OBJECTS + 10 * count
        for name, entry in itertools.islice(StoragePath(folder, options).walk(), left):
            left -= 1
            if (uri := f"{folder}/{name}") in wanted:
                found[uri] = entry
        if not left:
            unfinished.append(f"{folder}/")
    single = [uri for uri in wanted - found.keys() if uri.startswith(tuple(unfinished))]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        entries = pool.map(lambda uri: _stat(StoragePath(uri, options)), single)
        return found | {uri: entry for uri, entry in zip(single, entries, strict=True) if entry is not None}


def _stat(path: StoragePath) -> Entry | None:
    """The size and tag of an object; None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _hash_changed(
    files: pa.Table,
    changed: np.ndarray,
    parts: Iterator[HashedFiles],
    unreadable: dict[str, str],
    write: Callable[[pa.Table], None],
) -> pa.ChunkedArray:
    """The content keys of all files, after those at the positions `changed` were read.

    files: the manifest's rows of all images, without the keys of the changed ones. parts: the files at `changed`, as
    they are read. A file that cannot be read has no key, and its reason is added to `unreadable`. `write` is called now
    and then with the rows that have keys, and at the end.
    """
    numbers, keys, count = list[np.ndarray](), list[pa.Array](), 0

    def all_keys() -> pa.ChunkedArray:
        """The keys of all files so far."""
        rows = np.full(len(files), -1, np.int64)
        rows[changed[np.concatenate(numbers)]] = np.arange(count)
        return pc.coalesce(files["key"], pa.chunked_array(keys).take(pa.array(rows, mask=rows < 0)))

    write_at = time.monotonic() + _WRITE_EVERY_S
    with progress("content keys", len(changed)) as advance:
        for part in parts:
            numbers.append(part.numbers)
            keys.append(part.keys)
            unreadable |= part.reasons
            count += len(part.numbers)
            advance(len(part.numbers))
            begin = time.monotonic()
            if count == len(changed) or begin > write_at:
                found = all_keys()
                write(files.set_column(3, "key", found).filter(pc.is_valid(found)))
                now = time.monotonic()
                write_at = now + max(_WRITE_EVERY_S, (now - begin) / _WRITE_SHARE)
    if count != len(changed):
        raise RuntimeError(f"{count} of {len(changed)} files were hashed; repeat the command")
    return found


def _write(path: StoragePath, rows: pa.Table, stored: pa.Table) -> None:
    """Writes a manifest with these rows, and those stored rows that have other URIs."""
    other_rows = stored.filter(pc.invert(pc.is_in(stored["uri"], value_set=rows["uri"])))
    if rows.num_rows:
        write_table(path, pa.concat_tables([rows, other_rows]))


def hash_with_threads(uris: pa.Array, options: StorageOptions = StorageOptions()) -> Iterator[HashedFiles]:
    """Reads and hashes files with threads of this process (`HashFiles`)."""

    def content_key(uri: str) -> tuple[str | None, str]:
        """The key of a file, or None and the reason."""
        try:
            return hashlib.sha256(read_image_file(StoragePath(uri, options))).hexdigest(), ""
        except StorageError:
            raise  # an outage, or missing rights; the image is not at fault
        except OSError as error:
            return None, reason_of(error)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # reading and hashing release the interpreter's lock
        for start in range(0, len(uris), _URIS_PER_SLICE):
            part = uris.slice(start, _URIS_PER_SLICE).to_pylist()
            keys, reasons = zip(*pool.map(content_key, part), strict=True)
            failed = {uri: reason for uri, reason in zip(part, reasons, strict=True) if reason}
            yield HashedFiles(np.arange(start, start + len(part)), pa.array(keys, pa.string()), failed)
