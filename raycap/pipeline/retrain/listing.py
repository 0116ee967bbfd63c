"""The files of the data folder or S3 prefix, what changed since the previous listing, and the held-out split.

A listing contains URIs, sizes and tags (on S3 the ETags), for which no file is read. It is an Arrow table of about 150
bytes per file. Comparing two listings uses one hash table of their URIs.

Models are compared on the held-out split. The first comparison fixes its images and references. They are identified by
their content, so that a file may be moved or renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import Section
from raycap.pipeline.data.content_keys import ENTRIES
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath, join
from raycap.pipeline.storage.s3 import Entry, is_remote
from raycap.pipeline.storage.tables import from_bytes, to_bytes

# the files of a listing, and the content keys of the images found in them, which are rows without a file
LISTING = ENTRIES.append(pa.field("key", pa.string()))


class Change(Section):
    """The numbers of files that differ between two listings."""

    added: int
    changed: int
    gone: int

    def __str__(self) -> str:
        return f"{self.added} new, {self.changed} changed, {self.gone} gone"


def list_data(config: RunConfig, root: str) -> pa.Table:
    """The listing of the data root and of remote image folders outside of it, without content keys.

    Hidden files and raycap's results are not listed.
    """
    rows = [{"uri": uri, "size": entry.size, "tag": entry.tag} for uri, entry in _list_files(config, root)]
    return pa.Table.from_pylist(rows, LISTING)


def _list_files(config: RunConfig, root: str) -> Iterator[tuple[str, Entry]]:
    # The results are not data, and are not listed. Synthetic images are in the results folder, which is then listed.
    results = f"{config.storage_place.uri.rstrip('/')}/" if config.data.synthetic is None else None
    image_folders = {config.data.images, *(source.images for source in config.data.sources)}
    inside = f"{root.rstrip('/')}/"
    outside = [each for each in sorted(image_folders) if is_remote(each) and not f"{each}/".startswith(inside)]
    for prefix in [root, *outside]:
        for name, entry in StoragePath(prefix, config.storage.options).walk():
            uri = join(prefix, name)
            if "/." not in f"/{name}" and not (results and uri.startswith(results)):
                yield uri, entry


def compare(now: pa.Table, before: pa.Table | None) -> Change:
    """The numbers of files that differ from the previous listing. Without a previous listing, every file is new."""
    if before is None:
        return Change(added=now.num_rows, changed=0, gone=0)
    before = before.filter(pc.is_valid(before["size"]))
    rows = pc.index_in(now["uri"], value_set=before["uri"])  # null for a new file
    previous = before.take(rows)
    same = pc.and_(pc.equal(previous["size"], now["size"]), pc.equal(previous["tag"], now["tag"]))
    added = rows.null_count
    changed = now.num_rows - added - _count(pc.fill_null(same, False))
    return Change(added=added, changed=changed, gone=before.num_rows - (now.num_rows - added))


def with_keys(listing: pa.Table, dataset: Dataset) -> pa.Table:
    """The listing and the content keys of the data set, by which a later retraining recognizes images."""
    nulls = [pa.nulls(len(dataset), field.type) for field in ENTRIES]
    return pa.concat_tables([listing, pa.table([*nulls, dataset.table["key"]], LISTING)])


def new_keys(dataset: Dataset, before: pa.Table | None) -> int:
    """The number of images whose content is not in the previous listing."""
    if before is None:
        return len(dataset)
    return len(dataset) - _count(pc.is_in(dataset.table["key"], value_set=before["key"].drop_null()))


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)  # the sum over no rows is None


class HeldOut(NamedTuple):
    """The fixed split, and how many of its images are gone (`missing`) or are now used for training (`leaked`)."""

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


def find_held_out(file: bytes | None, dataset: Dataset, config: RunConfig) -> HeldOut:
    """The fixed split in `file` with the current locations of its images; ids and references do not change.

    None chooses the split. Raises UserError if it then has fewer than two images.
    """
    name, current, data = held_out_split(config), dataset.readable(), config.data
    if file is None:
        chosen = current.split(name)
        if len(chosen) < 2:
            raise UserError(
                f"retrain.split = {name} has {len(chosen)} images; CIDEr-D needs two documents or more, better hundreds"
            )
        file = to_bytes(chosen.table.select(SCHEMA.names))
    fixed = from_bytes(file, SCHEMA, "the held-out split")
    rows = pc.index_in(fixed["key"], value_set=current.table["key"])  # null for an image that is gone
    uris = current.table["uri"].take(rows)
    part = Dataset(fixed.set_column(SCHEMA.get_field_index("uri"), "uri", uris).filter(pc.is_valid(rows)))
    training = current.split(*({*data.train_splits, data.val_split} - {name}))
    leaked = _count(pc.is_in(fixed["key"], value_set=pc.unique(training.table["key"])))
    return HeldOut(file, part, missing=rows.null_count, leaked=leaked)
