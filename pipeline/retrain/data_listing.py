"""Lists the files of the data folder or S3 prefix and counts those that changed since the previous listing.

A listing contains names, sizes and tags (on S3 the ETags), for which no file is read. It is an Arrow table of about 150
bytes per file. Comparing two listings uses one hash table of their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.config.sections import Section
from pipeline.data.dataset import Dataset
from pipeline.storage.path import Entry, StoragePath, is_remote, join

LISTING = pa.schema(
    [
        ("name", pa.string()),  # relative to the data root; a URI for files outside of it
        ("size", pa.int64()),
        ("tag", pa.string()),  # the modification time in ns, or the ETag
        ("key", pa.string()),  # the sha256 of an image's content; null for other files
    ]
)
_CHUNK_ROWS = 8192


class Change(Section):
    """How many files differ between two listings."""

    added: int
    changed: int
    gone: int

    def __str__(self) -> str:
        return f"{self.added} new, {self.changed} changed, {self.gone} gone"


def list_data(config: RunConfig, root: str) -> pa.Table:
    """The listing of the data root and of remote image folders outside of it, without content keys.

    Hidden files and raycap's results are not listed.
    """
    # synthetic data is itself below the folder of the results
    results = f"{config.storage_place.uri.rstrip('/')}/" if config.data.synthetic is None else None
    chunks = []
    for names, entries in _chunked(_list_files(config, root, skipped_prefix=results)):
        sizes, tags = [entry.size for entry in entries], [entry.tag for entry in entries]
        chunks.append(pa.record_batch([names, sizes, tags, pa.nulls(len(names), pa.string())], schema=LISTING))
    return pa.Table.from_batches(chunks, LISTING)


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """How many files differ from the previous listing; without one every file is new."""
    if before is None:
        return Change(added=now.num_rows, changed=0, gone=0)
    rows = pc.index_in(now["name"], value_set=before["name"])  # null for a new file
    previous = before.take(rows)
    same = pc.and_(pc.equal(previous["size"], now["size"]), pc.equal(previous["tag"], now["tag"]))
    added = rows.null_count
    changed = now.num_rows - added - int(pc.sum(pc.fill_null(same, False)).as_py() or 0)
    return Change(added=added, changed=changed, gone=before.num_rows - (now.num_rows - added))


def with_keys(listing: pa.Table, dataset: Dataset, root: str) -> pa.Table:
    """Adds the content keys of the data set's images, by which a later retraining recognizes the images."""
    prefix = f"{root.rstrip('/')}/"
    uris = dataset.table["uri"]
    is_below_root = pc.starts_with(uris, prefix)
    names = pc.if_else(is_below_root, pc.utf8_slice_codeunits(uris, len(prefix)), uris)
    keys = dataset.table["key"].take(pc.index_in(listing["name"], value_set=names))
    return listing.set_column(LISTING.get_field_index("key"), "key", keys)


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """The number of images whose content is not in the previous listing."""
    if before is None:
        return len(dataset)
    known = pc.is_in(dataset.table["key"], value_set=before["key"].drop_null())
    return len(dataset) - int(pc.sum(known).as_py() or 0)


def _list_files(config: RunConfig, root: str, *, skipped_prefix: str | None) -> Iterator[tuple[str, Entry]]:
    """The files below the root with their names, then those of remote image folders outside of it with their URIs."""
    image_folders = {config.data.images, *(source.images for source in config.data.sources)}
    for prefix in [root, *sorted(folder for folder in image_folders if is_remote(folder))]:
        is_listed_with_root = prefix != root and f"{prefix}/".startswith(f"{root.rstrip('/')}/")
        if is_listed_with_root:
            continue
        for name, entry in StoragePath(prefix, config.storage.options).walk():
            uri = join(prefix, name)
            is_hidden = name.startswith(".") or "/." in name
            is_skipped = skipped_prefix is not None and uri.startswith(skipped_prefix)
            if not is_hidden and not is_skipped:
                yield (name if prefix == root else uri), entry


def _chunked(entries: Iterator[tuple[str, Entry]]) -> Iterator[tuple[list[str], list[Entry]]]:
    """Groups the files into lists of names and lists of entries."""
    while chunk := list(itertools.islice(entries, _CHUNK_ROWS)):
        yield [name for name, _ in chunk], [entry for _, entry in chunk]
