"""Content keys: the sha256 of every image file. A file that has not changed is not read again.

The manifest, a Parquet file, lists the size, tag and content key of each image. The tag is the file's modification
time, or its ETag on S3. If size and tag are those of the manifest, the file counts as unchanged. An image in an archive
or table has the size and tag of the archive or table. The manifest is also written while images are read, so that a
kill or an outage loses little work.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import (
    PARTS,
    ImageLocation,
    forget_row_groups,
    is_remote_image,
    read_image_file,
    reason_of,
)
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.storage.cache import image_cache
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import Entry, StorageError, StorageOptions, is_remote
from raycap.pipeline.storage.tables import read_cache, to_bytes

_FILES_PER_TASK = 64  # files whose sizes a thread looks up in one task
_NUM_THREADS = 8
_URIS_PER_SLICE = 1000  # files per batch; after each batch the manifest may be written
_WRITE_EVERY_S = 60.0  # the least time between two writes of the manifest
_WRITE_SHARE = 1 / 20  # writes of the manifest take at most this fraction of the time
_LISTED_OBJECTS = 1000  # plus 10 per image: the most objects that are listed, as a folder may have a billion

ENTRIES = pa.schema([("uri", pa.string()), ("size", pa.int64()), ("tag", pa.string())])
MANIFEST = ENTRIES.append(pa.field("key", pa.string()))
# The sha256 of each of some files, or None if it cannot be read, and {URI: why the file cannot be read}.
HashedFiles = tuple[list[str | None], dict[str, str]]
HashFiles = Callable[[pa.Array, StorageOptions], Iterator[HashedFiles]]


def take_snapshot(
    dataset: Dataset,
    manifest: StoragePath | Path,
    options: StorageOptions = StorageOptions(),
    hash_new: HashFiles | None = None,
    listing: pa.Table | None = None,
) -> tuple[Dataset, dict[str, str]]:
    """The data set with the content keys of readable images, and {URI: reason} for those that cannot be read.

    manifest: the path of a table of MANIFEST, which is written if a file is new or has changed. hash_new: reads
    these files; `hash_files` with the default size of the cache if it is None. listing: sizes and tags that the caller
    knows already, with the columns of ENTRIES, so that these files are not looked up again. Raises StorageError for an
    outage.
    """
    forget_row_groups()
    path, uris = storage_path(manifest), pc.unique(dataset.table["uri"])
    files = [ImageLocation.parse(uri).file.uri if uri.startswith(PARTS) else uri for uri in uris.to_pylist()]
    entries, reasons = _find_entries(dict.fromkeys(files), options, listing or ENTRIES.empty_table())
    unreadable = {uri: reasons[file] for uri, file in zip(uris.to_pylist(), files, strict=True) if file in reasons}
    found = [entries.get(file) for file in files]
    sizes = pa.array([entry and entry.size for entry in found], pa.int64())
    tags = pa.array([entry and entry.tag for entry in found], pa.string())
    stored = read_cache(path, MANIFEST)
    before = stored.take(pc.index_in(uris, value_set=stored["uri"]))
    is_same = pc.fill_null(pc.and_(pc.equal(before["size"], sizes), pc.equal(before["tag"], tags)), False)
    keys = pc.if_else(is_same, before["key"], None).to_numpy()

    def write() -> None:
        """Writes the manifest: a new row for each image that has a key, and all other rows as they were."""
        rows = pa.table([uris, sizes, tags, pa.array(keys, pa.string())], schema=MANIFEST)
        rows = rows.filter(pc.is_valid(rows["key"]))
        others = stored.filter(pc.invert(pc.is_in(stored["uri"], value_set=rows["uri"])))
        path.write_bytes(to_bytes(pa.concat_tables([rows, others]).combine_chunks()))

    changed = np.flatnonzero(pc.and_(pc.invert(is_same), pc.is_valid(sizes)).to_numpy())
    if len(changed):
        batches = (hash_new or hash_files)(uris.take(pa.array(changed)), options)
        unreadable |= _set_keys(keys, changed, batches, write)
    column = pa.array(keys, pa.string()).take(pc.index_in(dataset.table["uri"], value_set=uris).combine_chunks())
    return dataset.with_column("key", column), unreadable


def _set_keys(
    keys: np.ndarray, changed: np.ndarray, batches: Iterator[HashedFiles], write: Callable[[], None]
) -> dict[str, str]:
    """Sets the keys of changed files while they are hashed. Returns {URI: reason} of the files that cannot be read.

    changed: the positions of these files in `keys`. batches: from `hash_files`. write: writes the manifest, now and
    then and at the end.
    """
    unreadable: dict[str, str] = {}
    num_hashed, write_at = 0, time.monotonic() + _WRITE_EVERY_S
    with progress("content keys", len(changed)) as advance:
        for hashed, reasons in batches:
            keys[changed[num_hashed : num_hashed + len(hashed)]] = hashed
            unreadable |= reasons
            num_hashed += len(hashed)
            advance(len(hashed))
            begin = time.monotonic()
            if begin > write_at:
                write()
                end = time.monotonic()
                write_at = end + max(_WRITE_EVERY_S, (end - begin) / _WRITE_SHARE)
    write()
    return unreadable


def _find_entries(
    files: Collection[str], options: StorageOptions, listing: pa.Table
) -> tuple[dict[str, Entry], dict[str, str]]:
    """{path or URI: size and tag}, and {path or URI: reason} of missing files. listing: known sizes."""
    objects = {uri for uri in files if is_remote(uri)}
    listed = listing.filter(pc.is_in(listing["uri"], value_set=pa.array(objects, pa.string()))).to_pylist()
    entries = {row["uri"]: Entry(row["size"], row["tag"]) for row in listed}
    found, unfinished = _list_objects(objects - entries.keys(), options)
    entries |= found
    reasons = {uri: "no such object" for uri in objects - entries.keys() if not uri.startswith(unfinished)}

    def ask(file: str) -> Entry | str:
        """The size and tag of a file or object, or the reason why it is missing."""
        try:
            if is_remote(file):
                return StoragePath(file, options).stat()
            status = os.stat(file)  # noqa: PTH116 (making a Path costs more than the stat)
            return Entry(status.st_size, str(status.st_mtime_ns))
        except StorageError:
            raise
        except OSError as error:
            return "no such object" if is_remote(file) else reason_of(error)

    asked = [file for file in files if file not in entries and file not in reasons]
    slices = [asked[start : start + _FILES_PER_TASK] for start in range(0, len(asked), _FILES_PER_TASK)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # threads, because requests and network file systems mostly wait
        answers = pool.map(lambda part: list(map(ask, part)), slices)
        for file, answer in zip(asked, itertools.chain.from_iterable(answers), strict=True):
            if isinstance(answer, Entry):
                entries[file] = answer
            else:
                reasons[file] = answer
    return entries, reasons


def _list_objects(uris: Collection[str], options: StorageOptions) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """{URI: size and tag} of objects on S3, and the folders that were not listed to the end.

    A folder is listed together with the folders below it. If it has many other objects, its listing ends early, so that
    the remaining images must be looked up one by one.
    """
    images_below = Counter[str]()  # {folder that is in no other folder of images: number of images below it}
    top = ""
    for folder, count in sorted(Counter(uri.rsplit("/", 1)[0] for uri in uris).items()):
        if not top or not folder.startswith(f"{top}/"):
            top = folder
        images_below[top] += count
    found, unfinished = dict[str, Entry](), list[str]()
    for top, count in images_below.items():
        limit = _LISTED_OBJECTS + 10 * count
        objects = list(itertools.islice(StoragePath(top, options).walk(), limit))
        found |= {f"{top}/{name}": entry for name, entry in objects if f"{top}/{name}" in uris}
        if len(objects) == limit:
            unfinished.append(f"{top}/")
    return found, tuple(unfinished)


def hash_files(
    uris: pa.Array | pa.ChunkedArray, options: StorageOptions = StorageOptions(), cache_bytes: int | None = None
) -> Iterator[HashedFiles]:
    """Reads and hashes files with threads of this process. Images on S3 are cached on this machine.

    cache_bytes: the cache's size in bytes (`features.cache_gib`). If it is None, the default size is used. Yields the
    results of consecutive files. Raises StorageError for an outage.
    """

    def read(uri: str) -> tuple[str | None, str]:
        """A file's sha256, or None and the reason why it cannot be read."""
        try:
            data = read_image_file(StoragePath(uri, options))
        except StorageError:
            raise
        except OSError as error:
            return None, reason_of(error)
        key = hashlib.sha256(data).hexdigest()
        if cache is not None and is_remote_image(uri):
            with suppress(OSError):  # if the disk cannot be written, the image is downloaded again later
                cache.add(key, data)
        return key, ""

    for start in range(0, len(uris), _URIS_PER_SLICE):
        part = uris.slice(start, _URIS_PER_SLICE).to_pylist()
        cache = image_cache(cache_bytes) if any(map(is_remote_image, part)) else None
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            found = list(pool.map(read, part))
        reasons = {uri: reason for uri, (key, reason) in zip(part, found, strict=True) if key is None}
        yield [key for key, _ in found], reasons
