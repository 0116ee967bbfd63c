"""The captions of a data set by image."""

from __future__ import annotations

import pyarrow as pa

from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.training.rewards.cider_d import References


def test_references_of_a_selection_are_those_of_its_images() -> None:
    captions = [[f"a {number}", f"b {number}"] for number in range(9)]
    splits = ["val" if number % 3 == 1 else "train" for number in range(9)]
    table = pa.table([range(10, 19), splits, ["u"] * 9, captions, ["k"] * 9], schema=SCHEMA)
    train = Dataset(pa.concat_tables([table.slice(0, 4), table.slice(4)])).split("train")
    references, chosen = References.of(train), captions[0::3] + captions[2::3]
    assert sorted(references) == sorted(chosen) and references[2] == captions[3]
    assert references.indices_of([18, 10]).tolist() == [5, 0]
