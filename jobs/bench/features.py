"""The benchmarks of extraction and of the feature store: `raycap bench extract | store | plan`.

Each measures both of its sides in one run, and prints what it measured and on what.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

TOKENS, WIDTH = 144, 1536  # Swin-L at 384 px
KNOWN, NEW = 999_000, 1_000


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="raycap-bench-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def bench_extract(images: Path | None, count: int, image_size: int, batch_size: int, threads: int | None) -> float:
    """Images/s through Ray Data over images/s of a plain loop, before and after it; returns the ratio.

    Steady state: from the first finished shard (or batch) to the last, so that neither side's start counts.
    """
    import ray

    from jobs.cluster import start_ray
    from pipeline.config.load import load_config
    from pipeline.features.extraction import Extractor, resolve_dtype
    from pipeline.runs.prepare import initial_backbone
    from pipeline.runtime.weights import save_weights
    from pipeline.version import project_root

    with _scratch(None) as scratch:
        table = _images(images, count, scratch)
        overrides = [f"storage={scratch}", "backbone={name: swin_tiny_patch4_window7_224, weights: none}"]
        config = load_config(project_root() / "configs" / "demo.yaml", overrides)
        backbone = replace(config.backbone, image_size=image_size)
        config = config.model_copy(update={"backbone": backbone})
        threads = threads or os.cpu_count() or 1
        settings = config.features.model_copy(
            update={"batch_size": batch_size, "rows_per_shard": batch_size, "threads_per_actor": threads}
        )
        settings = settings.model_copy(update={"max_images_for_tasks": 0})
        weights = scratch / "backbone.safetensors"
        save_weights(initial_backbone(config), weights)
        extractor = Extractor(backbone, weights, settings, config.data.max_pixels)
        dtype = resolve_dtype("auto")
        print(f"{len(table)} images, swin_tiny at {image_size} px, batches of {batch_size}, {dtype}, {threads} threads")
        rates = [_alone(_plain_loop, extractor, dtype, table)]
        start_ray(config, None)
        rates.append(_ray_data(table, scratch / "ray", extractor))
        ray.shutdown()
        rates.append(_alone(_plain_loop, extractor, dtype, table))
    plain = (rates[0] + rates[2]) / 2
    print(f"plain loop   {rates[0]:.1f} and {rates[2]:.1f} images/s, before and after")
    print(f"Ray Data     {rates[1]:.1f} images/s")
    print(f"ratio        {rates[1] / plain:.3f}")
    return rates[1] / plain


def _images(folder: Path | None, count: int, scratch: Path) -> pa.Table:
    """Keys and paths of `count` photographs: those of a folder, or noise drawn at COCO's size."""
    from PIL import Image

    if folder is None:
        rng = np.random.default_rng(0)
        (scratch / "images").mkdir()
        for number in range(count):
            coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(scratch / "images" / f"{number}.jpg", quality=90)
        folder = scratch / "images"
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))[:count]
    keys = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return pa.table({"key": keys, "uri": [str(path) for path in paths]})


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process, whose memory and threads are then its own alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _plain_loop(extractor: Any, dtype: str, table: pa.Table) -> float:
    """Images/s of a loop that decodes, resizes and computes one batch after the other in its one thread."""
    from pipeline.data.images import decode_image
    from pipeline.features.extraction import ShardWriter
    from pipeline.storage.path import storage_path

    writer = ShardWriter(storage_path(extractor.weights.parent / "plain"), extractor, dtype)

    def one(part: list[str]) -> None:
        decoded = [writer.transform.resize(decode_image(Path(u).read_bytes(), extractor.max_pixels)) for u in part]
        writer.features(np.stack(decoded))

    size, uris = writer.settings.batch_size, table["uri"].to_pylist()
    begin, done = 0.0, 0
    for start in range(0, len(uris), size):
        part = uris[start : start + size]
        writer.thread.submit(one, part).result()
        if start:
            done += len(part)
        else:
            begin = time.monotonic()
    return done / (time.monotonic() - begin)


def _ray_data(table: pa.Table, folder: Path, extractor: Any) -> float:
    from pipeline.features.extraction import compute
    from pipeline.features.store import FeatureStore
    from pipeline.storage.path import storage_path

    for _ in compute(table, storage_path(folder), extractor):
        pass
    assert len(FeatureStore(folder)) == len(table), "Ray Data lost images"
    ends = sorted(path.stat().st_mtime_ns for path in (folder / "manifest").iterdir())
    return (len(table) - extractor.settings.rows_per_shard) / ((ends[-1] - ends[0]) / 1e9)


def bench_store(folder: Path | None, gigabytes: float, batch: int, batches: int) -> tuple[float, float]:
    """`gather` of random rows of 144 x 1536 float16, cold and warm, in MiB/s. Needs the disk space for the store."""
    from pipeline.features.store import FeatureStore, write_shard

    rng = np.random.default_rng(0)
    rows_per_shard = 256
    shards = int(np.ceil(gigabytes * 1e9 / (rows_per_shard * TOKENS * WIDTH * 2)))
    with _scratch(folder) as scratch:
        block = rng.integers(0, 2**14, (rows_per_shard, TOKENS, WIDTH), np.uint16).view(np.float16)
        for number in range(shards):
            write_shard(scratch, [f"{number}-{row}" for row in range(rows_per_shard)], block)
        size = sum(path.stat().st_size for path in (scratch / "shards").iterdir())
        keys = [f"{number}-{row}" for number in range(shards) for row in range(rows_per_shard)]
        chosen = [keys[row] for row in rng.permutation(len(keys))[: batch * batches]]
        print(f"{shards} shards, {size / 1e9:.2f} GB; {batches} batches of {batch} random rows")
        rates = []
        for name in ("cold", "warm"):
            store = FeatureStore(scratch)
            positions = store.locate(chosen)
            if name == "cold":
                _drop_cache(scratch / "shards")
            begin = time.monotonic()
            for start in range(0, len(positions), batch):
                store.gather_at(positions[start : start + batch])
            seconds = time.monotonic() - begin
            rates.append(len(chosen) * TOKENS * WIDTH * 2 / 2**20 / seconds)
            print(f"{name:<6} {rates[-1]:.0f} MiB/s, {len(chosen) / seconds:.0f} rows/s")
    return rates[0], rates[1]


def _drop_cache(folder: Path) -> None:
    """Takes the shards out of the page cache; they are on the disk, because writing them ended with fsync."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bench_plan(folder: Path | None, known: int = KNOWN, new: int = NEW) -> dict[str, float]:
    """What is left to do of a million images of which a thousand are new: seconds and peak memory of the plan."""
    with _scratch(folder) as scratch:
        _make_plan_inputs(scratch, known, new)
        result: dict[str, float] = _alone(_plan, scratch)  # its peak memory is the plan's
    assert result["missing"] == new, result
    print(f"{known + new} rows, {new} new")
    print(f"annotations  {result['annotations']:.1f} s")
    print(f"content keys {result['snapshot']:.1f} s")
    print(f"plan         {result['plan']:.1f} s")
    print(f"peak memory  {result['peak_mb']:.0f} MiB")
    return result


def _make_plan_inputs(scratch: Path, known: int, new: int) -> None:
    """Files (links to a few, so that a million fit), their table, the manifest and the index of the known ones."""
    import pyarrow.parquet as pq

    from pipeline.data import content_keys as snapshot
    from pipeline.features import store

    folder, per_folder = scratch / "images", 30_000
    uris, sizes, tags = [], [], []
    for start in range(0, known, per_folder):
        part = folder / str(start // per_folder)
        part.mkdir(parents=True)
        base = part / "base"
        base.write_bytes(b"x" * (start // per_folder + 1))
        status = base.stat()
        for number in range(start, min(known, start + per_folder)):
            path = f"{part}/{number}.jpg"
            os.link(base, path)
            uris.append(path)
            sizes.append(status.st_size)
            tags.append(str(status.st_mtime_ns))
    keys = [hashlib.sha256(uri.encode()).hexdigest() for uri in uris]
    known_table = pa.table([uris, sizes, tags, keys], schema=snapshot.MANIFEST)
    pq.write_table(known_table, scratch / "manifest.parquet")
    shards = [hashlib.sha256(str(number // 256).encode()).hexdigest()[:32] for number in range(known)]
    index = {"key": keys, "shard": shards, "row": [number % 256 for number in range(known)], "sha256": shards}
    nothing = [None] * known
    index |= {"bytes": [1] * known, "length": nothing, "boxes_sha256": nothing}
    (scratch / "store" / "manifest").mkdir(parents=True)
    for shard in set(shards):
        (scratch / "store" / "manifest" / f"{shard}.parquet").touch()
    pq.write_table(pa.table(index, schema=store.MANIFEST), scratch / "store" / store.INDEX)
    (folder / "new").mkdir()
    for number in range(new):
        fresh = folder / "new" / f"{number}.jpg"
        fresh.write_bytes(f"new {number}".encode())
        uris.append(str(fresh))
    table = {
        "image": [uri.removeprefix(f"{folder}/") for uri in uris],
        "id": range(len(uris)),
        "captions": [["a photograph of something"]] * len(uris),
    }
    pq.write_table(pa.table(table), scratch / "table.parquet")


def _plan(scratch: Path) -> dict[str, float]:
    import resource

    from pipeline.config.sections import DataSection
    from pipeline.data.content_keys import take_snapshot
    from pipeline.data.dataset import read_annotations
    from pipeline.features.extraction import plan_extraction
    from pipeline.storage.path import storage_path

    times = [time.monotonic()]
    section = DataSection(root=str(scratch), annotations="table.parquet", images="images")
    dataset, _ = read_annotations(section, scratch)
    times.append(time.monotonic())
    dataset, troubles = take_snapshot(dataset, scratch / "manifest.parquet")
    times.append(time.monotonic())
    plan = plan_extraction(dataset, storage_path(scratch / "store"), 10**8)
    times.append(time.monotonic())
    assert not troubles
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = dict(zip(("annotations", "snapshot", "plan"), np.diff(times).tolist(), strict=True))
    return {**seconds, "missing": len(plan.missing), "peak_mb": peak}
