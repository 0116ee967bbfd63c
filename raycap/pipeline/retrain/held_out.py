"""The held-out split, on which models are compared. The first comparison fixes its images and references.

Images are identified by their content, so that a file may be moved or renamed.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow.compute as pc

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.tables import from_bytes, to_bytes


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


def choose(dataset: Dataset, config: RunConfig) -> bytes:
    """The readable images of the held-out split as a Parquet file; raises UserError if there are fewer than two."""
    name = held_out_split(config)
    part = dataset.split(name).readable()
    if len(part) < 2:
        raise UserError(
            f"retrain.split = {name} has {len(part)} images; CIDEr-D needs two documents or more, better hundreds"
        )
    return to_bytes(part.table.select(SCHEMA.names))


def locate(file: bytes, dataset: Dataset, config: RunConfig) -> HeldOut:
    """The fixed split in `file` with the current locations of its images; ids and references do not change."""
    fixed, current, data = from_bytes(file, SCHEMA, "the held-out split"), dataset.readable(), config.data
    rows = pc.index_in(fixed["key"], value_set=current.table["key"])  # null for an image that is gone
    uris = current.table["uri"].take(rows)
    part = Dataset(fixed.set_column(SCHEMA.get_field_index("uri"), "uri", uris).filter(pc.is_valid(rows)))
    training_splits = {*data.train_splits, data.val_split} - {held_out_split(config)}
    training = current.split(*training_splits)
    leaked = pc.sum(pc.is_in(fixed["key"], value_set=pc.unique(training.table["key"]))).as_py() or 0
    return HeldOut(file, part, missing=rows.null_count, leaked=int(leaked))
