"""`raycap bench store` and `raycap bench plan`: reads from the feature store, and planning of an extraction."""

from __future__ import annotations

import hashlib
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from raycap.jobs.bench.measuring import in_new_process, timed
from raycap.jobs.options import Folder
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.content_keys import MANIFEST, take_snapshot
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.features.extraction import plan_extraction
from raycap.pipeline.features.store.index import MANIFEST as STORE_MANIFEST
from raycap.pipeline.features.store.shards import INDEX
from raycap.pipeline.features.store.store import FeatureStore, write_shard
from raycap.pipeline.storage.path import storage_path

TOKENS, WIDTH = 144, 1536  # Swin-L at 384 px
ROWS_PER_SHARD = 256
ROW_BYTES = TOKENS * WIDTH * 2  # float16
FILES_PER_FOLDER = 30_000  # links to one file; file systems limit them, ext4 to 65,000


def bench_store(
    folder: Folder = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the store. The disk needs this space.")] = 4.5,
    batch: Annotated[int, typer.Option(min=1, help="Rows per read.")] = 48,
    batches: Annotated[int, typer.Option(min=1, help="Number of reads.")] = 40,
) -> None:
    """Random reads from the feature store.

    Rows of 144 x 1536 float16 are read with a cold and with a warm page cache. MiB per second are printed.

    Example: raycap bench store --folder /fast/disk
    """
    rng = np.random.default_rng(0)
    num_shards = int(np.ceil(gigabytes * 1e9 / (ROWS_PER_SHARD * ROW_BYTES)))
    with tempfile.TemporaryDirectory(prefix="raycap-bench-", dir=folder) as scratch:
        root = Path(scratch)
        # bit patterns below 2**14 are the float16 numbers from 0 to 2
        block = rng.integers(0, 2**14, (ROWS_PER_SHARD, TOKENS, WIDTH), np.uint16).view(np.float16)
        keys = [f"{number}-{row}" for number in range(num_shards) for row in range(ROWS_PER_SHARD)]
        for start in range(0, len(keys), ROWS_PER_SHARD):
            write_shard(root, keys[start : start + ROWS_PER_SHARD], block)
        size = sum(path.stat().st_size for path in (root / "shards").iterdir())
        chosen = [keys[row] for row in rng.permutation(len(keys))[: batch * batches]]
        print(f"{num_shards} shards, {size / 1e9:.2f} GB; {batches} batches of {batch} random rows")
        for name in ("cold", "warm"):
            store = FeatureStore(root)
            positions = store.locate(pa.array(chosen))
            if name == "cold":
                _drop_cache(root / "shards")
            begin = time.monotonic()
            for start in range(0, len(positions), batch):
                store.gather_at(positions[start : start + batch])
            rate = len(chosen) / (time.monotonic() - begin)
            print(f"{name:<6} {rate * ROW_BYTES / 2**20:.0f} MiB/s, {rate:.0f} rows/s")


def _drop_cache(folder: Path) -> None:
    """Removes the shards from the page cache. They are on the disk, because writing a shard ends with fsync."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bench_plan(
    folder: Folder = None,
    known: Annotated[int, typer.Option(min=1, help="Images that the store contains.")] = 999_000,
    new: Annotated[int, typer.Option(min=1, help="Images that it lacks.")] = 1_000,
) -> None:
    """Time and memory to plan an extraction of a million images.

    A thousand of the images are new. Seconds and peak memory are printed.

    Example: raycap bench plan
    """
    with tempfile.TemporaryDirectory(prefix="raycap-bench-", dir=folder) as scratch:
        root = Path(scratch)
        images = _link_images(root / "images", known)
        _write_store(root, images)
        _write_table(root, [uri for uri, _, _ in images], new)
        print(f"{known + new} rows, {new} new")
        in_new_process(_plan, root, new)


def _link_images(folder: Path, count: int) -> list[tuple[str, int, str]]:
    """Path, size and tag of `count` images, which are hard links to a few files, so that a million fit on the disk."""
    images = []
    for start in range(0, count, FILES_PER_FOLDER):
        part = folder / str(start // FILES_PER_FOLDER)
        part.mkdir(parents=True)
        base = part / "base"
        base.write_bytes(b"x" * (start // FILES_PER_FOLDER + 1))  # each folder's images have a size of their own
        size, tag = base.stat().st_size, str(base.stat().st_mtime_ns)
        for number in range(start, min(count, start + FILES_PER_FOLDER)):
            path = f"{part}/{number}.jpg"
            os.link(base, path)
            images.append((path, size, tag))
    return images


def _write_store(root: Path, images: list[tuple[str, int, str]]) -> None:
    """Writes the manifest of content keys and the index of a made-up store that lists `images`.

    There are no shards, because planning does not read them; their digests and sizes are invented.
    """
    uris, sizes, tags = zip(*images, strict=True)
    keys, count = [hashlib.sha256(uri.encode()).hexdigest() for uri in uris], len(images)
    pq.write_table(pa.table([uris, sizes, tags, keys], schema=MANIFEST), root / "manifest.parquet")
    shards = [hashlib.sha256(str(row // ROWS_PER_SHARD).encode()).hexdigest()[:32] for row in range(count)]
    index = {"key": keys, "shard": shards, "row": [row % ROWS_PER_SHARD for row in range(count)], "sha256": shards}
    index |= {"bytes": [1] * count, "length": [None] * count, "boxes_sha256": [None] * count}
    (root / "store" / "manifest").mkdir(parents=True)
    for shard in set(shards):
        (root / "store" / "manifest" / f"{shard}.parquet").touch()
    (root / "store" / INDEX).mkdir()
    pq.write_table(pa.table(index, schema=STORE_MANIFEST), root / "store" / INDEX / "all.parquet")


def _write_table(root: Path, uris: list[str], num_new: int) -> None:
    """The data set's table: images that the store contains, and `num_new` others, which this function writes."""
    folder = root / "images"
    (folder / "new").mkdir()
    images = [uri.removeprefix(f"{folder}/") for uri in uris]
    for number in range(num_new):
        image = f"new/{number}.jpg"
        (folder / image).write_bytes(f"new {number}".encode())
        images.append(image)
    captions = [["a photograph of something"]] * len(images)
    pq.write_table(pa.table({"image": images, "id": range(len(images)), "captions": captions}), root / "table.parquet")


def _plan(root: Path, num_new: int) -> None:
    """Plans the extraction; prints the seconds of each step and the peak memory of this process."""
    section = DataSection(root=str(root), annotations="table.parquet", images="images")
    (dataset, _), seconds = timed(lambda: read_annotations(section, root))
    print(f"annotations  {seconds:.1f} s")
    (dataset, unreadable), seconds = timed(lambda: take_snapshot(dataset, root / "manifest.parquet"))
    print(f"content keys {seconds:.1f} s")
    plan, seconds = timed(lambda: plan_extraction(dataset, storage_path(root / "store"), max_pixels=10**8))
    print(f"plan         {seconds:.1f} s")
    print(f"peak memory  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    assert not unreadable and len(plan.missing) == num_new
