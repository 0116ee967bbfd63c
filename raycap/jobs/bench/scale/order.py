"""The part "order": the order of shards, for one of 64 workers. Each image has five captions, which are the samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raycap.jobs.bench.scale.data import CAPTIONS_PER_IMAGE
from raycap.jobs.bench.scale.keys import ROWS_PER_SHARD
from raycap.jobs.bench.scale.measured import Measurement, measured
from raycap.pipeline.training.sample_order import ShardOrder

BATCH_SIZE, WORLD_SIZE = 1024, 64


def measure_order(rows: int, folder: Path) -> Iterator[Measurement]:
    """The tables of an epoch with the positions of its first and middle step. A step takes a few milliseconds."""
    yield measured("order: worker's epoch", rows, _two_steps, rows)


def _two_steps(rows: int) -> None:
    sizes = np.full(-(-rows // ROWS_PER_SHARD), CAPTIONS_PER_IMAGE * ROWS_PER_SHARD)
    order = ShardOrder(sizes, BATCH_SIZE, accumulation_steps=1, buffer=0.1, seed=0)
    for step in (0, order.num_samples // BATCH_SIZE // 2):
        positions = np.arange(BATCH_SIZE) + step * BATCH_SIZE
        order.shards_at(positions[: BATCH_SIZE // WORLD_SIZE], lambda _: WORLD_SIZE)
        assert len(np.unique(order.samples_at(positions, lambda _: WORLD_SIZE))) == BATCH_SIZE
