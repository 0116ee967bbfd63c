"""`raycap bench store`: random reads from the feature store, with a cold and a warm page cache."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jobs.options import Folder
from pipeline.features.store import FeatureStore, write_shard

TOKENS, WIDTH = 144, 1536  # Swin-L at 384 px
ROWS_PER_SHARD = 256


def bench_store(
    folder: Folder = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the store. The disk needs this space.")] = 4.5,
    batch: Annotated[int, typer.Option(min=1, help="Rows per read.")] = 48,
    batches: Annotated[int, typer.Option(min=1, help="Number of reads.")] = 40,
) -> tuple[float, float]:
    """Random reads from the feature store.

    Rows of 144 x 1536 float16 are read with a cold and with a warm page cache. MiB per second are printed and returned.

    Example: raycap bench store --folder /fast/disk
    """
    rng = np.random.default_rng(0)
    num_shards = int(np.ceil(gigabytes * 1e9 / (ROWS_PER_SHARD * TOKENS * WIDTH * 2)))
    with tempfile.TemporaryDirectory(prefix="raycap-bench-", dir=folder) as scratch:
        root = Path(scratch)
        block = rng.integers(0, 2**14, (ROWS_PER_SHARD, TOKENS, WIDTH), np.uint16).view(np.float16)
        for number in range(num_shards):
            write_shard(root, [f"{number}-{row}" for row in range(ROWS_PER_SHARD)], block)
        size = sum(path.stat().st_size for path in (root / "shards").iterdir())
        keys = [f"{number}-{row}" for number in range(num_shards) for row in range(ROWS_PER_SHARD)]
        chosen = [keys[row] for row in rng.permutation(len(keys))[: batch * batches]]
        print(f"{num_shards} shards, {size / 1e9:.2f} GB; {batches} batches of {batch} random rows")
        rates = []
        for name in ("cold", "warm"):
            store = FeatureStore(root)
            positions = store.locate(chosen)
            if name == "cold":
                _drop_cache(root / "shards")
            begin = time.monotonic()
            for start in range(0, len(positions), batch):
                store.gather_at(positions[start : start + batch])
            seconds = time.monotonic() - begin
            rates.append(len(chosen) * TOKENS * WIDTH * 2 / 2**20 / seconds)
            print(f"{name:<6} {rates[-1]:.0f} MiB/s, {len(chosen) / seconds:.0f} rows/s")
    return rates[0], rates[1]


def _drop_cache(folder: Path) -> None:
    """Removes the shards from the page cache. They are on the disk, because writing a shard ends with fsync."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
