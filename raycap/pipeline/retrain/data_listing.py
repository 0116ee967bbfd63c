"""Lists the files of the data folder or S3 prefix and counts those that changed since the previous listing.

A listing contains names, sizes and tags (on S3 the ETags), for which no file is read. It is an Arrow table of about 150
bytes per file. Comparing two listings uses one hash table of their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import Section
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import PARTS
from raycap.pipeline.storage.path import Entry, StoragePath, is_remote, join

LISTING = pa.schema(
    [
        ("name", pa.string()),  # relative to the data root; a URI for files outside of it
        ("size", pa.int64()),
        ("tag", pa.string()),  # the modification time in ns, or the ETag
        ("key", pa.string()),  # the sha256 of an image's content; null for other files
    ]
)
CHUNK_ROWS = 8192  # this many files at a time are converted to Arrow, which bounds the memory


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
    # synthetic data is itself in the folder of the results, which must then be listed
    results = f"{config.storage_place.uri.rstrip('/')}/" if config.data.synthetic is None else None
    files, batches = _list_files(config, root, skipped_prefix=results), []
    while chunk := list(itertools.islice(files, CHUNK_ROWS)):
        rows = [{"name": name, "size": entry.size, "tag": entry.tag} for name, entry in chunk]
        batches.append(pa.RecordBatch.from_pylist(rows, LISTING))
    return pa.Table.from_batches(batches, LISTING)


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """How many files differ from the previous listing; without one every file is new."""
    if before is None:
        return Change(added=now.num_rows, changed=0, gone=0)
    before = before.filter(pc.is_valid(before["size"]))
    rows = pc.index_in(now["name"], value_set=before["name"])  # null for a new file
    previous = before.take(rows)
    same = pc.and_(pc.equal(previous["size"], now["size"]), pc.equal(previous["tag"], now["tag"]))
    added = rows.null_count
    num_same = pc.sum(pc.fill_null(same, False)).as_py() or 0  # the sum over no rows is None
    changed = now.num_rows - added - int(num_same)
    return Change(added=added, changed=changed, gone=before.num_rows - (now.num_rows - added))


def with_keys(listing: pa.Table, dataset: Dataset, root: str) -> pa.Table:
    """The listing with the content keys of the data set's images, by which a later retraining recognizes images.

    Images in an archive or table are further rows without a size, which `compare` leaves out.
    """
    is_in_file = pc.or_(*(pc.starts_with(dataset.table["uri"], begin) for begin in PARTS))
    parts = dataset.table.filter(is_in_file)
    rows = [parts["uri"], *(pa.nulls(len(parts), LISTING.field(name).type) for name in ("size", "tag")), parts["key"]]
    prefix, uris = f"{root.rstrip('/')}/", dataset.table["uri"]
    # an image's name in the listing is relative to the root, or its URI if it is outside of the root
    names = pc.if_else(pc.starts_with(uris, prefix), pc.utf8_slice_codeunits(uris, len(prefix)), uris)
    keys = dataset.table["key"].take(pc.index_in(listing["name"], value_set=names))
    listed = listing.set_column(LISTING.get_field_index("key"), "key", keys)
    return pa.concat_tables([listed, pa.table(rows, LISTING)]) if len(parts) else listed


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """The number of images whose content is not in the previous listing."""
    if before is None:
        return len(dataset)
    is_known = pc.is_in(dataset.table["key"], value_set=before["key"].drop_null())
    return len(dataset) - int(pc.sum(is_known).as_py() or 0)  # the sum over no rows is None


def _list_files(config: RunConfig, root: str, *, skipped_prefix: str | None) -> Iterator[tuple[str, Entry]]:
    """The files below the root with their names, then those of remote image folders outside of it with their URIs."""
    image_folders = {config.data.images, *(source.images for source in config.data.sources)}
    outside = [
        folder
        for folder in sorted(image_folders)
        if is_remote(folder) and not f"{folder}/".startswith(f"{root.rstrip('/')}/")
    ]
    for prefix in [root, *outside]:
        for name, entry in StoragePath(prefix, config.storage.options).walk():
            uri = join(prefix, name)
            is_hidden = "/." in f"/{name}"
            if not is_hidden and not (skipped_prefix and uri.startswith(skipped_prefix)):
                yield (name if prefix == root else uri), entry
