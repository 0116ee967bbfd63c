"""A listing of the data folder or prefix, and the files that changed since the previous listing.

A listing holds names, sizes and tags (ETags on S3); no file is read. It is built in chunks as an Arrow table of about
150 bytes per file. Two listings are compared through one hash table of the names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.storage.path import Entry, StoragePath, is_remote, join

LISTING = pa.schema(
    [
        ("name", pa.string()),  # relative to the data root; a URI for files outside of it
        ("size", pa.int64()),
        ("tag", pa.string()),  # modification time in ns, or the ETag
        ("key", pa.string()),  # sha256 of an image's content; null for other files
    ]
)
_CHUNK = 8192


class Change(NamedTuple):
    """Counts of files."""

    added: int
    changed: int
    gone: int

    def __str__(self) -> str:
        return f"{self.added} new, {self.changed} changed, {self.gone} gone"


def list_data(config: RunConfig, root: str) -> pa.Table:
    """Every file below the data root and below image prefixes outside of it, without content keys.

    Hidden files and raycap's own results below the root are skipped.
    """
    results = f"{config.storage_place.uri.rstrip('/')}/" if config.data.synthetic is None else None
    chunks = []
    for names, entries in _chunked(_walk(config, root, results)):
        sizes, tags = [entry.size for entry in entries], [entry.tag for entry in entries]
        chunks.append(pa.record_batch([names, sizes, tags, pa.nulls(len(names), pa.string())], schema=LISTING))
    return pa.Table.from_batches(chunks, LISTING)


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """Counts of differing files; without a previous listing every file is new."""
    if before is None:
        return Change(now.num_rows, 0, 0)
    rows = pc.index_in(now["name"], value_set=before["name"])
    previous = before.take(rows)
    same = pc.and_(pc.equal(previous["size"], now["size"]), pc.equal(previous["tag"], now["tag"]))
    added = rows.null_count
    changed = now.num_rows - added - int(pc.sum(pc.fill_null(same, False)).as_py() or 0)
    return Change(added, changed, before.num_rows - (now.num_rows - added))


def with_keys(listing: pa.Table, dataset: Dataset, root: str) -> pa.Table:
    """The listing with the content keys of the data set's images, by which a later retraining recognizes them."""
    prefix = f"{root.rstrip('/')}/"
    uris = dataset.table["uri"]
    inside = pc.starts_with(uris, prefix)
    names = pc.if_else(inside, pc.utf8_slice_codeunits(uris, len(prefix)), uris)
    keys = dataset.table["key"].take(pc.index_in(listing["name"], value_set=names))
    return listing.set_column(LISTING.get_field_index("key"), "key", keys)


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """The number of images whose content is not in the previous listing."""
    if before is None:
        return len(dataset)
    known = pc.is_in(dataset.table["key"], value_set=before["key"].drop_null())
    return len(dataset) - int(pc.sum(known).as_py() or 0)


def _walk(config: RunConfig, root: str, results: str | None) -> Iterator[tuple[str, Entry]]:
    image_prefixes = {config.data.images, *(source.images for source in config.data.sources)}
    for prefix in [root, *sorted(prefix for prefix in image_prefixes if is_remote(prefix))]:
        if prefix != root and f"{prefix}/".startswith(f"{root.rstrip('/')}/"):
            continue
        for name, entry in StoragePath(prefix, config.storage.options).walk():
            uri = join(prefix, name)
            hidden = name.startswith(".") or "/." in name
            if not hidden and not (results and uri.startswith(results)):
                yield (name if prefix == root else uri), entry


def _chunked(entries: Iterator[tuple[str, Entry]]) -> Iterator[tuple[list[str], list[Entry]]]:
    while chunk := list(itertools.islice(entries, _CHUNK)):
        yield [name for name, _ in chunk], [entry for _, entry in chunk]
