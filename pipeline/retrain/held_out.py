"""The held-out split on which models are compared: fixed at its first use, the same images and references ever after.

Images are known by their content, wherever they lie later; their references are those of the first time.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow.compute as pc

from pipeline.config.run import RunConfig
from pipeline.data.dataset import SCHEMA, Dataset
from pipeline.errors import UserError
from pipeline.storage.tables import from_bytes, to_bytes


class HeldOut(NamedTuple):
    """The images that can be captioned now, how many are gone, and how many a model is now trained on."""

    part: Dataset
    missing: int
    leaked: int


def held_out_split(config: RunConfig) -> str:
    """The name of the split; UserError for one that training uses."""
    name = config.retrain.split or next(iter(config.data.test_splits), config.data.val_split)
    if name in config.data.train_splits:
        raise UserError(f"retrain.split = {name} is one of data.train_splits; name a split that training never sees")
    return name


def choose(dataset: Dataset, config: RunConfig) -> Dataset:
    """The split as it is now; UserError when it has fewer than two images that can be read and are captioned."""
    name = held_out_split(config)
    part = dataset.split(name).known()
    if len(part) < 2:
        raise UserError(
            f"retrain.split = {name} has {len(part)} images; CIDEr-D needs two documents or more, better hundreds"
        )
    return part


def encode(part: Dataset) -> bytes:
    return to_bytes(part.table)


def decode(data: bytes) -> Dataset:
    return Dataset(from_bytes(data, SCHEMA))


def locate(fixed: Dataset, dataset: Dataset, config: RunConfig) -> HeldOut:
    """The fixed split's images where they lie now, with the ids and references of their first use."""
    known = dataset.known()
    at = pc.index_in(fixed.table["key"], value_set=known.table["key"])
    there = pc.is_valid(at)
    uris = known.table["uri"].take(at)
    index = SCHEMA.get_field_index("uri")
    part = Dataset(fixed.table.set_column(index, "uri", uris).filter(there))
    data = config.data
    learned = known.split(*{*data.train_splits, data.val_split} - {held_out_split(config)})
    leaked = pc.sum(pc.is_in(fixed.table["key"], value_set=pc.unique(learned.table["key"]))).as_py() or 0
    return HeldOut(part, len(fixed) - len(part), int(leaked))
