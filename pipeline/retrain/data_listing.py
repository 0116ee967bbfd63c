"""What the data's folder or prefix holds, and what has changed there since the last retraining.

One listing: names, sizes and tags (on S3 ETags), not a byte of an image. Chunk by chunk into Arrow, about 150 bytes a
file; compared by one hash table over the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.storage.path import Entry, StoragePath, is_remote, join

LISTING = pa.schema(
    [
        ("name", pa.string()),  # below the data's root; the URI of what lies elsewhere
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
    """Every file below the data's root, and below image prefixes elsewhere; without keys.

    Hidden files and what raycap itself writes below the root do not count.
    """
    own = f"{config.storage_place.uri.rstrip('/')}/"
    drawn = config.data.synthetic is not None
    chunks = []
    for name, entry in _chunked(_walk(config, root, own if not drawn else "")):
        sizes, tags = [each.size for each in entry], [each.tag for each in entry]
        chunks.append(pa.record_batch([name, sizes, tags, pa.nulls(len(name), pa.string())], schema=LISTING))
    return pa.Table.from_batches(chunks, LISTING)


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """What is new in a listing; everything, without one before."""
    if before is None:
        return Change(now.num_rows, 0, 0)
    at = pc.index_in(now["name"], value_set=before["name"])
    known = before.take(at)
    same = pc.and_(pc.equal(known["size"], now["size"]), pc.equal(known["tag"], now["tag"]))
    added = at.null_count
    changed = now.num_rows - added - int(pc.sum(pc.fill_null(same, False)).as_py() or 0)
    return Change(added, changed, before.num_rows - (now.num_rows - added))


def with_keys(listing: pa.Table, dataset: Dataset, root: str) -> pa.Table:
    """The listing with the content keys of the data set's images, so that a later one knows them again."""
    prefix = f"{root.rstrip('/')}/"
    uris = dataset.table["uri"]
    inside = pc.starts_with(uris, prefix)
    names = pc.if_else(inside, pc.utf8_slice_codeunits(uris, len(prefix)), uris)
    keys = dataset.table["key"].take(pc.index_in(listing["name"], value_set=names))
    return listing.set_column(LISTING.get_field_index("key"), "key", keys)


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """Images of the data set whose content the listing before does not have."""
    if before is None:
        return len(dataset)
    known = pc.is_in(dataset.table["key"], value_set=before["key"].drop_null())
    return len(dataset) - int(np.count_nonzero(known.to_numpy(zero_copy_only=False)))


def _walk(config: RunConfig, root: str, own: str) -> Iterator[tuple[str, Entry]]:
    elsewhere = {config.data.images, *(source.images for source in config.data.sources)}
    for place in [root, *sorted(prefix for prefix in elsewhere if is_remote(prefix))]:
        if place != root and f"{place}/".startswith(f"{root.rstrip('/')}/"):
            continue
        for name, entry in StoragePath(place, config.storage.options).walk():
            uri = join(place, name)
            hidden = name.startswith(".") or "/." in name
            if not hidden and not (own and uri.startswith(own)):
                yield (name if place == root else uri), entry


def _chunked(entries: Iterator[tuple[str, Entry]]) -> Iterator[tuple[list[str], list[Entry]]]:
    names: list[str] = []
    found: list[Entry] = []
    for name, entry in entries:
        names.append(name)
        found.append(entry)
        if len(names) == _CHUNK:
            yield names, found
            names, found = [], []
    yield names, found
