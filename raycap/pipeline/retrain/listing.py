"""The files of the data folder or S3 prefix, what changed since the previous listing, and the held-out split.

A listing contains names, sizes and tags (on S3 the ETags), for which no file is read. It is an Arrow table of about 150
bytes per file. Comparing two listings uses one hash table of their names.

Models are compared on the held-out split. The first comparison fixes its images and references. They are identified by
their content, so that a file may be moved or renamed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import Section
from raycap.pipeline.data.content_keys import ENTRIES
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.formats.location import PARTS
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import Entry, StoragePath, is_remote, join
from raycap.pipeline.storage.s3 import REMOTE
from raycap.pipeline.storage.tables import from_bytes, to_bytes

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


def objects(listing: pa.Table, root: str) -> pa.Table:
    """The objects on S3 of a listing as a table of ENTRIES, for `take_snapshot`."""
    names = listing["name"]
    uris = pc.if_else(pc.starts_with(names, REMOTE), names, pc.binary_join_element_wise(root.rstrip("/"), names, "/"))
    entries = pa.table([uris, listing["size"], listing["tag"]], ENTRIES)
    return entries.filter(pc.starts_with(uris, REMOTE))


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


class HeldOut(NamedTuple):
    """The fixed split, and the numbers of its images that are gone (`missing`) or now used for training (`leaked`)."""

    file: bytes  # the fixed split as a Parquet file
    part: Dataset  # its images that still exist
    missing: int
    leaked: int


def held_out_split(config: RunConfig) -> str:
    """The name of the held-out split: retrain.split, else the first test split, else the validation split.

    Raises UserError if training uses it.
    """
    name = config.retrain.split or next(iter(config.data.test_splits), config.data.val_split)
    if name in config.data.train_splits:
        raise UserError(f"retrain.split = {name} is one of data.train_splits; name a split that training does not use")
    return name


def choose_held_out(dataset: Dataset, config: RunConfig) -> bytes:
    """The readable images of the held-out split as a Parquet file; raises UserError if there are fewer than two."""
    name = held_out_split(config)
    part = dataset.split(name).readable()
    if len(part) < 2:
        raise UserError(
            f"retrain.split = {name} has {len(part)} images; CIDEr-D needs two documents or more, better hundreds"
        )
    return to_bytes(part.table.select(SCHEMA.names))


def locate_held_out(file: bytes, dataset: Dataset, config: RunConfig) -> HeldOut:
    """The fixed split in `file` with the current locations of its images; ids and references do not change."""
    fixed, current, data = from_bytes(file, SCHEMA, "the held-out split"), dataset.readable(), config.data
    rows = pc.index_in(fixed["key"], value_set=current.table["key"])  # null for an image that is gone
    uris = current.table["uri"].take(rows)
    part = Dataset(fixed.set_column(SCHEMA.get_field_index("uri"), "uri", uris).filter(pc.is_valid(rows)))
    training_splits = {*data.train_splits, data.val_split} - {held_out_split(config)}
    training = current.split(*training_splits)
    leaked = pc.sum(pc.is_in(fixed["key"], value_set=pc.unique(training.table["key"]))).as_py() or 0
    return HeldOut(file, part, missing=rows.null_count, leaked=int(leaked))
