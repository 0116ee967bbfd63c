"""Content keys: the sha256 of every image file. A file that has not changed is not read again.

The files are read by threads of this process, or by an extraction, whose tasks hash the bytes that they read anyway.

A manifest holds the URI, size, tag and content key of each image; the tag is the modification time, or the ETag on S3.
A file with the same size and tag as in the manifest counts as unchanged. Images in an archive or table have the size
and tag of this file. The cost is one stat per file and one read per new or changed image. On S3 the sizes and tags of a
thousand files come from one listing request. What is found is also written while images are read, so that a kill or an
outage loses little of this work.

Images are compared with the manifest one of its parts at a time, and lists of all images are in memory-mapped files.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.data.dataset import ROUND_ROWS, Dataset
from raycap.pipeline.data.images import (
    MAX_BYTES,
    PARTS,
    UNREADABLE,
    ImageLocation,
    forget_pages,
    hash_batch,
    reason_of,
)
from raycap.pipeline.data.manifests import MANIFEST, Manifest, divided, hashes
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import REMOTE, Entry, StorageOptions, is_remote
from raycap.pipeline.storage.tables import TableSpill, spilled, spilled_zeros

_URIS_PER_TASK = 8192  # files whose sizes a thread looks up in one task
_UNREADABLE_SIZE = -1  # replaces the size of a file that cannot be read
_NUM_THREADS = 8
_URIS_PER_SLICE = 1000  # files that are hashed between two looks at the clock
_ROWS_AT_A_TIME = 2**16  # that are moved between files
# New rows are written once a minute, and so seldom that the writes take a twentieth of the time. More than
# _MAX_UNWRITTEN are written at once, whatever that takes, because those of one write are in memory together.
_WRITE_EVERY_S, _WRITE_SHARE, _MAX_UNWRITTEN = 60.0, 1 / 20, 2**19
# A listing ends after this many objects plus ten per image: one image may be in a bucket of a billion objects.
_LISTED_OBJECTS = 1000
_NO_OBJECT = "no such object"

# The images of a data set. file: the file or object of an image that is a part of one; null for other images
_IMAGES = pa.schema([("row", pa.int64()), ("uri", pa.string()), ("file", pa.string())])
_FILES = pa.schema([("row", pa.int64()), *(MANIFEST.field(name) for name in ("uri", "size", "tag"))])
ENTRIES = pa.schema([MANIFEST.field(name) for name in ("uri", "size", "tag")])
# What is known of an image: it needs no key; it has one; its file is to be read; it has a key that is not written yet
_NOTHING, _HAS_KEY, _CHANGED, _NEW = range(4)


class HashedFiles(NamedTuple):
    """Some files that were read. numbers: (R,) int64, their places in the argument of `HashFiles`, in any order.

    keys: their sha256, null for a file that cannot be read. reasons: why, as {URI: reason}.
    """

    numbers: np.ndarray
    keys: pa.Array
    reasons: dict[str, str]

    @classmethod
    def of_batch(cls, batch: dict[str, np.ndarray]) -> HashedFiles:
        """The files of a Ray batch with the columns number, uri, key, which is "" without one, and reason."""
        is_bad = batch["key"] == ""
        bad = zip(batch["uri"][is_bad], batch["reason"][is_bad], strict=True)
        reasons = {str(uri): str(reason).removeprefix(f"{UNREADABLE}: ") for uri, reason in bad}
        return cls(batch["number"], pa.array(batch["key"], pa.string(), mask=is_bad), reasons)


# Reads and hashes the files at URIs, each once. Raises StorageError when the storage is out of order.
HashFiles = Callable[[pa.ChunkedArray, StorageOptions], Iterator[HashedFiles]]


def numbered_rounds(uris: pa.ChunkedArray) -> Iterator[pa.Table]:
    """URIs with their numbers, as tables with the columns uri and number, of ROUND_ROWS rows at a time for Ray."""
    for start in range(0, len(uris), ROUND_ROWS):
        part = uris.slice(start, ROUND_ROWS)
        yield pa.table({"uri": part, "number": start + np.arange(len(part))})


def take_snapshot(
    dataset: Dataset,
    manifest: StoragePath | Path,
    options: StorageOptions = StorageOptions(),
    hash_files: HashFiles | None = None,
    listing: pa.Table | None = None,
) -> tuple[Dataset, dict[str, str]]:
    """The data set with the content keys of readable images, and {URI: reason} for those that cannot be read.

    manifest: the path of a `Manifest`, used when it exists and brought up to date when a file is new or has changed.
    hash_files: what reads new and changed files; None for threads of this process. listing: files that the
    caller has listed, with the columns of ENTRIES. Folders on S3 are listed only for images that are not among
    them. The memory is that of `manifests.PART_IMAGES` images and some 4 bytes per image; unreadable images take more.
    Raises StorageError when the storage is out of order.
    """
    forget_pages()
    uris = dataset.table["uri"]
    snapshot = _Snapshot(uris, Manifest(storage_path(manifest), len(uris)), options)
    snapshot.compare(ENTRIES.empty_table() if listing is None else listing)
    changed = snapshot.changed()
    if len(changed):
        batches = (pa.RecordBatch.from_arrays([part], ["uri"]) for part in _chosen(uris, changed))
        changed_uris = spilled(pa.schema([MANIFEST.field("uri")]), batches)["uri"]
        snapshot.hash(changed, (hash_files or hash_with_threads)(changed_uris, options))
    snapshot.write()
    return dataset.with_column("key", snapshot.keys()), snapshot.unreadable


def _chosen(uris: pa.ChunkedArray, rows: np.ndarray) -> Iterator[pa.Array]:
    """The URIs at these rows, which ascend, some at a time."""
    start = 0
    for chunk in uris.chunks:
        begin, end = np.searchsorted(rows, [start, start + len(chunk)])
        for first in range(begin, end, _ROWS_AT_A_TIME):
            yield chunk.take(pa.array(rows[first : min(end, first + _ROWS_AT_A_TIME)] - start))
        start += len(chunk)


class _Snapshot:
    """The images at `uris`, what a manifest says about them, and their keys as they become known."""

    def __init__(self, uris: pa.ChunkedArray, manifest: Manifest, options: StorageOptions) -> None:
        self.unreadable: dict[str, str] = {}
        self._manifest, self._options = manifest, options
        self._images, self._archives = _divide(uris, manifest.bits)
        self._files = TableSpill(_FILES, manifest.num_parts)
        self._others = TableSpill(MANIFEST, manifest.num_parts)  # stored rows of other images and of changed ones
        self._keys, self._states = _Keys(len(uris)), np.zeros(len(uris), np.uint8)
        self._stale = set[int]()  # parts with changed files
        self._repeated: list[tuple[np.ndarray, np.ndarray]] = []  # rows with the URI of an earlier row, and that row

    def compare(self, listing: pa.Table) -> None:
        """Reads the sizes and tags of all files, and finds those that are new or have changed."""
        entries = _Entries(self._images, self._archives, self._options, listing)
        # of unreadable images: is missing, the row, the URI and the reason
        found: list[tuple[bool, int, str, str]] = []
        for part in range(self._manifest.num_parts):
            table = self._images.table(part).combine_chunks()
            images = _distinct(table)
            if len(images) < len(table):
                firsts = images["row"].take(pc.index_in(table["uri"], value_set=images["uri"])).to_numpy()
                rows = table["row"].to_numpy()
                self._repeated.append((rows[rows != firsts], firsts[rows != firsts]))
            sizes, tags, reasons = entries.read(part, images)
            # `read_bytes` knows the size of an image that is a part of a file
            is_large = pc.and_(pc.greater(sizes, MAX_BYTES), pc.is_null(images["file"]))
            for mask, is_missing in ((is_large, False), (pc.equal(sizes, _UNREADABLE_SIZE), True)):
                names = images.filter(mask).select(["row", "uri", "file"]).to_pylist()
                for row, uri, file in (each.values() for each in names):
                    reason = reasons[file or uri] if is_missing else f"larger than {MAX_BYTES} bytes"
                    found.append((is_missing, row, uri, reason))
            sizes = pc.if_else(is_large, _UNREADABLE_SIZE, sizes)
            self._compare_part(part, pa.table([images["row"], images["uri"], sizes, tags], schema=_FILES))
        self.unreadable = {uri: reason for _, _, uri, reason in sorted(found)}
        del self._images

    def _compare_part(self, part: int, files: pa.Table) -> None:
        """Notes which files of a part have changed, and the keys of the others."""
        files = files.combine_chunks()
        for batch in files.to_batches():
            self._files.append(batch, part)
        stored = self._manifest.read(part)
        previous = stored.select(["size", "tag", "key"]).take(pc.index_in(files["uri"], value_set=stored["uri"]))
        unchanged = pc.and_(pc.equal(previous["size"], files["size"]), pc.equal(previous["tag"], files["tag"]))
        unchanged = pc.and_(unchanged, pc.equal(pc.binary_length(previous["key"]), _Keys.LENGTH))
        unchanged = pc.fill_null(unchanged, False)
        is_unchanged, rows = unchanged.to_numpy(), files["row"].to_numpy()
        self._keys.put(rows[is_unchanged], previous["key"].filter(unchanged))
        self._states[rows[is_unchanged]] = _HAS_KEY
        changed = rows[~is_unchanged & (files["size"].to_numpy() >= 0)]
        self._states[changed] = _CHANGED
        if len(changed):
            self._stale.add(part)
        is_other = pc.invert(pc.is_in(stored["uri"], value_set=files["uri"].filter(unchanged)))
        for batch in stored.filter(is_other).to_batches():
            self._others.append(batch, part)

    def changed(self) -> np.ndarray:
        """The rows of the new and changed files, in ascending order."""
        return np.flatnonzero(self._states == _CHANGED)

    def hash(self, changed: np.ndarray, parts: Iterator[HashedFiles]) -> None:
        """Notes the keys of the files at the rows `changed`, as they are read, and writes them now and then.

        A file that cannot be read has no key, and its reason is added to `unreadable`.
        """
        count = unwritten = 0
        write_at = time.monotonic() + _WRITE_EVERY_S
        with progress("content keys", len(changed)) as advance:
            for part in parts:
                is_read = pc.is_valid(part.keys)
                rows = changed[part.numbers[is_read.to_numpy(zero_copy_only=False)]]
                self._keys.put(rows, part.keys.filter(is_read))
                self._states[rows] = _NEW
                self.unreadable |= part.reasons
                count, unwritten = count + len(part.numbers), unwritten + len(part.numbers)
                advance(len(part.numbers))
                begin = time.monotonic()
                if count < len(changed) and (begin > write_at or unwritten > _MAX_UNWRITTEN):
                    self._write_new()
                    now = time.monotonic()
                    write_at, unwritten = now + max(_WRITE_EVERY_S, (now - begin) / _WRITE_SHARE), 0
        if count != len(changed):
            raise RuntimeError(f"{count} of {len(changed)} files were hashed; repeat the command")

    def _write_new(self) -> None:
        """Adds the keys to the manifest that it does not have yet."""
        is_new = self._states == _NEW
        if is_new.any():
            parts = range(self._manifest.num_parts)
            self._manifest.add(pa.concat_tables([self._rows(part, is_new) for part in parts]))
        self._states[is_new] = _HAS_KEY

    def _rows(self, part: int, is_wanted: np.ndarray) -> pa.Table:
        """The manifest's rows of those images of a part for which a mask of all images is true."""
        rows = self._files.table(part)
        rows = rows.filter(pa.array(is_wanted[rows["row"].to_numpy()]))
        return rows.drop_columns(["row"]).append_column(MANIFEST.field("key"), self._keys.at(rows["row"].to_numpy()))

    def write(self) -> None:
        """Brings the parts of the manifest up to date whose files have changed or whose rows are elsewhere."""
        has_key = np.isin(self._states, (_HAS_KEY, _NEW))
        for part in range(self._manifest.num_parts):
            if part in self._stale or self._manifest.has_other_rows(part):
                rows, others = self._rows(part, has_key), self._others.table(part)
                others = others.filter(pc.invert(pc.is_in(others["uri"], value_set=rows["uri"])))
                if len(rows) + len(others):
                    self._manifest.write(part, pa.concat_tables([rows, others]))
        self._manifest.finish()

    def keys(self) -> pa.ChunkedArray:
        """The key of each image, null without one."""
        for rows, firsts in self._repeated:
            self._states[rows] = self._states[firsts]
            self._keys.copy(rows, firsts)
        return self._keys.column(np.isin(self._states, (_HAS_KEY, _NEW)))


def _divide(uris: pa.ChunkedArray, bits: int) -> tuple[TableSpill, list[str]]:
    """The rows of _IMAGES in 2**bits parts, and the files of which images are parts."""
    spill, files, start = TableSpill(_IMAGES, 2**bits), dict[str, None](), 0
    for chunk in uris.chunks:
        for first in range(0, len(chunk), _ROWS_AT_A_TIME):
            part = chunk.slice(first, _ROWS_AT_A_TIME)
            of_parts = _files_of(part)
            files.update(dict.fromkeys(pc.unique(of_parts.drop_null()).to_pylist()))
            rows = pa.array(np.arange(start, start + len(part)))
            for number, images in divided(pa.RecordBatch.from_arrays([rows, part, of_parts], schema=_IMAGES), bits):
                spill.append(images, number)
            start += len(part)
    return spill, list(files)


def _files_of(uris: pa.Array) -> pa.Array:
    """The path or URI of the file of which each image is a part; null for other images."""
    is_part = pc.or_(*(pc.starts_with(uris, begin) for begin in PARTS))
    if not pc.any(is_part).as_py():
        return pa.nulls(len(uris), pa.string())
    files = [ImageLocation.parse(uri).file.uri if uri.startswith(PARTS) else None for uri in uris.to_pylist()]
    return pa.array(files, pa.string())


def _distinct(images: pa.Table) -> pa.Table:
    """The first row of each URI, in their order."""
    uris = pc.unique(images["uri"])
    return images if len(uris) == len(images) else images.take(pc.index_in(uris, value_set=images["uri"]))


class _Keys:
    """A content key per image, in a mapped file unless they are few."""

    LENGTH = 64  # characters

    def __init__(self, count: int) -> None:
        self._values = spilled_zeros((count, self.LENGTH), np.uint8)

    def put(self, rows: np.ndarray, keys: pa.Array | pa.ChunkedArray) -> None:
        """Sets the keys of these rows, none of which is null."""
        for chunk in keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]:
            values = chunk.cast(pa.binary()).cast(pa.binary(self.LENGTH))
            content = np.frombuffer(values.buffers()[1] or b"", np.uint8).reshape(-1, self.LENGTH)
            self._values[rows[: len(values)]] = content[values.offset : values.offset + len(values)]
            rows = rows[len(values) :]

    def copy(self, rows: np.ndarray, sources: np.ndarray) -> None:
        """Gives rows the keys of other rows."""
        self._values[rows] = self._values[sources]

    def at(self, rows: np.ndarray) -> pa.Array:
        """The keys of these rows, which have one."""
        return self._strings(self._values[rows])

    def column(self, is_valid: np.ndarray) -> pa.ChunkedArray:
        """The keys of all rows, null where a mask is false. They are not copied."""
        parts = np.split(self._values, range(_ROWS_AT_A_TIME, len(self._values), _ROWS_AT_A_TIME))
        masks = np.split(is_valid, range(_ROWS_AT_A_TIME, len(self._values), _ROWS_AT_A_TIME))
        chunks = [
            self._strings(values, None if mask.all() else pa.py_buffer(np.packbits(mask, bitorder="little")))
            for values, mask in zip(parts, masks, strict=True)
        ]
        return pa.chunked_array(chunks, pa.string())

    def _strings(self, values: np.ndarray, validity: pa.Buffer | None = None) -> pa.Array:
        """Strings whose characters are in an array."""
        offsets = np.arange(len(values) + 1, dtype=np.int32) * self.LENGTH
        return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(values.ravel()), validity)


class _Entries:
    """The sizes and tags of the files of images. archives: the files of which images are parts."""

    def __init__(self, images: TableSpill, archives: list[str], options: StorageOptions, listing: pa.Table) -> None:
        objects = _Objects(images, [file for file in archives if is_remote(file)], options, listing)
        self._objects = objects.found
        local = [file for file in archives if not is_remote(file)]
        sizes, tags, self._reasons = _stat_files(pa.array(local, pa.string()))
        remote = [uri for uri in archives if is_remote(uri)]
        entries = [(uri, objects.archives.get(uri, Entry(_UNREADABLE_SIZE, ""))) for uri in remote]
        self._reasons |= {uri: _NO_OBJECT for uri in remote if uri not in objects.archives}
        of_local = pa.RecordBatch.from_arrays([pa.array(local, pa.string()), sizes, tags], schema=ENTRIES)
        self._archives = pa.Table.from_batches([of_local, _as_batch(entries)])

    def read(self, part: int, images: pa.Table) -> tuple[pa.Array, pa.Array, dict[str, str]]:
        """The size and tag of each image's file, and {path or URI: reason} of missing ones, of size _UNREADABLE_SIZE.

        images: distinct rows of _IMAGES, those of a part.
        """
        uris, files = (images[name].combine_chunks() for name in ("uri", "file"))
        is_part = pc.is_valid(files).to_numpy(zero_copy_only=False)
        is_object = pc.starts_with(uris, REMOTE).to_numpy(zero_copy_only=False) & ~is_part
        places = [np.flatnonzero(mask) for mask in (is_part, is_object, ~is_part & ~is_object)]
        of_parts, objects, local = (
            names.take(pa.array(place)) for names, place in zip((files, uris, uris), places, strict=True)
        )
        found = [_entries_in(self._archives, of_parts), _entries_in(self._objects.table(part), objects)]
        missing = objects.filter(pc.equal(found[1][0], _UNREADABLE_SIZE)).to_pylist()
        *of_local, reasons = _stat_files(local)
        order = pa.array(np.argsort(np.concatenate(places)))
        sizes, tags = (pa.concat_arrays(column).take(order) for column in zip(*found, of_local, strict=True))
        return sizes, tags, self._reasons | dict.fromkeys(missing, _NO_OBJECT) | reasons


def _entries_in(entries: pa.Table, names: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The sizes and tags of these names in a table of ENTRIES."""
    entries = entries.combine_chunks()
    rows = pc.index_in(names, value_set=entries["uri"])
    sizes, tags = (
        pa.concat_arrays([pa.array([], column.type), *column.take(rows).chunks]) for column in entries.columns[1:]
    )
    return pc.fill_null(sizes, _UNREADABLE_SIZE), pc.fill_null(tags, "")


def _stat_files(files: pa.Array) -> tuple[pa.Array, pa.Array, dict[str, str]]:
    """The size and tag of local files, and {path: reason} of missing ones, whose size is _UNREADABLE_SIZE."""
    reasons: dict[str, str] = {}

    def read_entry(file: str) -> tuple[int, str]:
        """The size in bytes and the tag of one file."""
        try:
            status = os.stat(file)  # noqa: PTH116 (making a Path costs more than the stat)
            return status.st_size, str(status.st_mtime_ns)
        except OSError as error:
            reasons[file] = reason_of(error)
        return _UNREADABLE_SIZE, ""

    def read_chunk(chunk: pa.Array) -> tuple[pa.Array, pa.Array]:
        sizes, tags = zip(*map(read_entry, chunk.to_pylist()), strict=True)
        # Arrays need a tenth of the memory of the lists.
        return pa.array(sizes, pa.int64()), pa.array(tags, pa.string())

    chunks = [files.slice(start, _URIS_PER_TASK) for start in range(0, len(files), _URIS_PER_TASK)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # threads, because a stat on a network file system mostly waits
        parts = [(pa.array([], pa.int64()), pa.array([], pa.string())), *pool.map(read_chunk, chunks)]
    sizes, tags = (pa.concat_arrays(column) for column in zip(*parts, strict=True))
    return sizes, tags, reasons


class _Objects:
    """The sizes and tags of the objects that exist: from a given listing, or else from one listing per folder.

    The listing of a folder with n images ends after 1 + n / 100 requests, of 1000 objects each. If more than nine of
    ten objects are no images of the data set, some images are not found by then; each of these is one more request.
    """

    def __init__(self, images: TableSpill, archives: list[str], options: StorageOptions, listing: pa.Table) -> None:
        """archives: the objects of which images are parts. listing: a table of ENTRIES."""
        self.found, self.archives = TableSpill(ENTRIES, images.parts), dict[str, Entry]()
        self._images, self._wanted_archives, self._options = images, pa.array(archives, pa.string()), options
        # By a part of its hash, whether an object may be one of the images. There may be ten times as many objects.
        num_images = sum(len(batch) for part in range(images.parts) for batch in images.batches(part))
        self._is_wanted = np.zeros(2 ** (2 * num_images).bit_length(), bool)
        for part in range(images.parts):
            self._is_wanted[hashes(self._uris(part)) % len(self._is_wanted)] = True
        for batch in listing.to_batches(max_chunksize=_ROWS_AT_A_TIME):
            self._add(batch)
        counts = Counter[str]()
        for uris in self._missing():
            counts.update(map(_folder_of, uris))
        self._list(counts)

    def _uris(self, part: int) -> pa.Array:
        """The objects of a part that are images, each once."""
        images = self._images.table(part).select(["uri", "file"])
        return pc.unique(
            images.filter(pc.and_(pc.is_null(images["file"]), pc.starts_with(images["uri"], REMOTE)))["uri"]
        )

    def _missing(self) -> Iterator[list[str]]:
        """The objects that are not found yet, some at a time."""
        yield [uri for uri in self._wanted_archives.to_pylist() if uri not in self.archives]
        for part in range(self._images.parts):
            uris = self._uris(part)
            yield uris.filter(pc.invert(pc.is_in(uris, value_set=self.found.table(part)["uri"]))).to_pylist()

    def _list(self, counts: Counter[str]) -> None:
        """Finds the objects. counts: how many are missing directly in each folder."""
        images_in: dict[str, int] = {}
        folder = ""
        for own_folder, count in sorted(counts.items()):
            if not folder or not own_folder.startswith(f"{folder}/"):  # a listing includes the folders below
                folder = own_folder
            images_in[folder] = images_in.get(folder, 0) + count
        unfinished: list[str] = []
        for folder, count in images_in.items():
            left = _LISTED_OBJECTS + 10 * count
            objects = itertools.islice(StoragePath(folder, self._options).walk(), left)
            while some := [(f"{folder}/{name}", entry) for name, entry in itertools.islice(objects, _URIS_PER_TASK)]:
                left -= len(some)
                self._add(_as_batch(some))
            if not left:
                unfinished.append(f"{folder}/")
        for uris in self._missing() if unfinished else ():
            self._ask([uri for uri in uris if uri.startswith(tuple(unfinished))])

    def _ask(self, uris: list[str]) -> None:
        """Looks for single objects."""
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            entries = pool.map(lambda uri: _stat(StoragePath(uri, self._options)), uris)
            found = [(uri, entry) for uri, entry in zip(uris, entries, strict=True) if entry is not None]
            self._add(_as_batch(found))

    def _add(self, objects: pa.RecordBatch) -> None:
        """Keeps those of these rows of ENTRIES that may be images, and the archives."""
        archives = objects.filter(pc.is_in(objects["uri"], value_set=self._wanted_archives)).to_pylist()
        self.archives |= {row["uri"]: Entry(row["size"], row["tag"]) for row in archives}
        batch = objects.filter(pa.array(self._is_wanted[hashes(objects["uri"]) % len(self._is_wanted)]))
        for part, entries in divided(batch, self._images.parts.bit_length() - 1):
            self.found.append(entries, part)


def _as_batch(objects: list[tuple[str, Entry]]) -> pa.RecordBatch:
    """Rows of ENTRIES."""
    return pa.RecordBatch.from_pylist(
        [{"uri": uri, "size": each.size, "tag": each.tag} for uri, each in objects], ENTRIES
    )


def _folder_of(uri: str) -> str:
    return uri.rsplit("/", 1)[0]


def _stat(path: StoragePath) -> Entry | None:
    """The size and tag of an object; None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def hash_with_threads(
    uris: pa.Array | pa.ChunkedArray, options: StorageOptions = StorageOptions(), cache_bytes: int | None = None
) -> Iterator[HashedFiles]:
    """Reads and hashes files with threads of this process (`HashFiles`). cache_bytes: see `hash_batch`."""
    for start in range(0, len(uris), _URIS_PER_SLICE):
        part = uris.slice(start, _URIS_PER_SLICE).to_numpy(zero_copy_only=False)
        batch = {"uri": part, "number": np.arange(start, start + len(part))}
        yield HashedFiles.of_batch(hash_batch(batch, options, cache_bytes, _NUM_THREADS))
