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

from jobs.bench.measuring import in_new_process
from jobs.options import Folder
from pipeline.config.sections import DataSection
from pipeline.data.content_keys import MANIFEST, take_snapshot
from pipeline.data.dataset import read_annotations
from pipeline.features.store import INDEX, FeatureStore, write_shard
from pipeline.features.store import MANIFEST as STORE_MANIFEST
from pipeline.storage.path import storage_path

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
            positions = store.locate(pa.array(chosen))
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


FILES_PER_FOLDER = 30_000


def bench_plan(
    folder: Folder = None,
    known: Annotated[int, typer.Option(min=1, help="Images that the store contains.")] = 999_000,
    new: Annotated[int, typer.Option(min=1, help="Images that it lacks.")] = 1_000,
) -> dict[str, float]:
    """Time and memory to plan an extraction of a million images.

    A thousand of the images are new. Seconds and peak memory are printed and returned.

    Example: raycap bench plan
    """
    with tempfile.TemporaryDirectory(prefix="raycap-bench-", dir=folder) as scratch:
        root = Path(scratch)
        uris, status = _link_images(root / "images", known)
        _write_store(root, uris, status)
        _write_table(root, uris, new)
        result: dict[str, float] = in_new_process(_plan, root)
    assert result["missing"] == new, result
    print(f"{known + new} rows, {new} new")
    print(f"annotations  {result['annotations']:.1f} s")
    print(f"content keys {result['snapshot']:.1f} s")
    print(f"plan         {result['plan']:.1f} s")
    print(f"peak memory  {result['peak_mb']:.0f} MiB")
    return result


def _link_images(folder: Path, count: int) -> tuple[list[str], list[os.stat_result]]:
    """Paths and status of `count` images, which are hard links to a few files, so that a million fit on the disk."""
    uris, status = [], []
    for start in range(0, count, FILES_PER_FOLDER):
        part = folder / str(start // FILES_PER_FOLDER)
        part.mkdir(parents=True)
        base = part / "base"
        base.write_bytes(b"x" * (start // FILES_PER_FOLDER + 1))
        base_status = base.stat()
        for number in range(start, min(count, start + FILES_PER_FOLDER)):
            uris.append(f"{part}/{number}.jpg")
            status.append(base_status)
            os.link(base, uris[-1])
    return uris, status


def _write_store(root: Path, uris: list[str], status: list[os.stat_result]) -> None:
    """The manifest of content keys and the store's index, for images that are known."""
    keys = [hashlib.sha256(uri.encode()).hexdigest() for uri in uris]
    sizes, tags = [entry.st_size for entry in status], [str(entry.st_mtime_ns) for entry in status]
    pq.write_table(pa.table([uris, sizes, tags, keys], schema=MANIFEST), root / "manifest.parquet")
    rows = range(len(uris))
    shards = [hashlib.sha256(str(row // ROWS_PER_SHARD).encode()).hexdigest()[:32] for row in rows]
    index = {"key": keys, "shard": shards, "row": [row % ROWS_PER_SHARD for row in rows], "sha256": shards}
    nothing = [None] * len(uris)
    index |= {"bytes": [1] * len(uris), "length": nothing, "boxes_sha256": nothing}
    (root / "store" / "manifest").mkdir(parents=True)
    for shard in set(shards):
        (root / "store" / "manifest" / f"{shard}.parquet").touch()
    pq.write_table(pa.table(index, schema=STORE_MANIFEST), root / "store" / INDEX)


def _write_table(root: Path, known: list[str], num_new: int) -> None:
    """The data set's table: the known images and `num_new` more, which are written here."""
    folder = root / "images"
    (folder / "new").mkdir()
    images = [uri.removeprefix(f"{folder}/") for uri in known]
    for number in range(num_new):
        images.append(f"new/{number}.jpg")
        (folder / images[-1]).write_bytes(f"new {number}".encode())
    captions = [["a photograph of something"]] * len(images)
    pq.write_table(pa.table({"image": images, "id": range(len(images)), "captions": captions}), root / "table.parquet")


def _plan(root: Path) -> dict[str, float]:
    """Seconds of each step and the peak memory of this process, in MiB."""
    from pipeline.features.extraction import plan_extraction

    times = [time.monotonic()]
    section = DataSection(root=str(root), annotations="table.parquet", images="images")
    dataset, _ = read_annotations(section, root)
    times.append(time.monotonic())
    dataset, unreadable = take_snapshot(dataset, root / "manifest.parquet")
    times.append(time.monotonic())
    plan = plan_extraction(dataset, storage_path(root / "store"), 10**8)
    times.append(time.monotonic())
    assert not unreadable
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = dict(zip(("annotations", "snapshot", "plan"), np.diff(times).tolist(), strict=True))
    return seconds | {"peak_mb": peak, "missing": float(len(plan.missing))}
