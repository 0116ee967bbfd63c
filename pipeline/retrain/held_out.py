"""The held-out split, on which models are compared. The first comparison fixes its images and references for good.

Images are identified by their content, so that they are found after their files were moved.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import SCHEMA, Dataset
from pipeline.errors import UserError
from pipeline.storage.tables import from_bytes, to_bytes


class HeldOut(NamedTuple):
    """The images that still exist, the number of those that do not, and the number of those now used for training."""

    part: Dataset
    missing: int
    leaked: int


def held_out_split(config: RunConfig) -> str:
    """The name of the split; UserError if training uses it."""
    name = config.retrain.split or next(iter(config.data.test_splits), config.data.val_split)
    if name in config.data.train_splits:
        raise UserError(f"retrain.split = {name} is one of data.train_splits; name a split that training does not use")
    return name


def choose(dataset: Dataset, config: RunConfig) -> Dataset:
    """The current images of the split; UserError for fewer than two readable images with captions."""
    name = held_out_split(config)
    part = dataset.split(name).readable()
    if len(part) < 2:
        raise UserError(
            f"retrain.split = {name} has {len(part)} images; CIDEr-D needs two documents or more, better hundreds"
        )
    return part


def encode(part: Dataset) -> bytes:
    """The split as the content of a Parquet file."""
    return to_bytes(part.table)


def decode(data: bytes) -> Dataset:
    """Reads what `encode` returned."""
    return Dataset(from_bytes(data, SCHEMA))


def locate(fixed: Dataset, dataset: Dataset, config: RunConfig) -> HeldOut:
    """The fixed split with its images' current locations; ids and references are those of the first comparison."""
    current = dataset.readable()
    rows = pc.index_in(fixed.table["key"], value_set=current.table["key"])  # null for an image that is gone
    uris = current.table["uri"].take(rows)
    part = Dataset(fixed.table.set_column(SCHEMA.get_field_index("uri"), "uri", uris).filter(pc.is_valid(rows)))
    data = config.data
    training_splits = {*data.train_splits, data.val_split} - {held_out_split(config)}
    training = current.split(*training_splits)
    leaked = pc.sum(pc.is_in(fixed.table["key"], value_set=pc.unique(training.table["key"]))).as_py() or 0
    return HeldOut(part, missing=len(fixed) - len(part), leaked=int(leaked))
