"""Feature extraction through Ray Data beside a plain loop, in one run."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer

from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.load import load_config
from raycap.pipeline.data.images import decode_image
from raycap.pipeline.features.extraction import Extractor, ShardWriter, compute
from raycap.pipeline.features.precision import measure_extraction
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.weights import save_weights
from raycap.pipeline.version import package_folder

from measuring import Threads, in_new_process, noise_jpegs


def bench_extract(
    images: Annotated[Path | None, typer.Option(help="A folder of photographs; by default generated noise.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 400,
    image_size: Annotated[int, typer.Option(min=32, help="Width and height of the backbone's input, in pixels.")] = 224,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch and per shard.")] = 16,
    threads: Threads = None,
) -> None:
    """Feature extraction through Ray Data beside a plain loop.

    The plain loop runs before and after Ray Data, with the same backbone. Times are from the first finished shard or
    batch to the last, so that start-up does not count. The ratio of images per second is printed. The default number
    of threads is that of all cores.

    Example: python benchmarks/extract.py --images /path/to/photographs
    """
    import ray

    from raycap.pipeline.runs.preflight import initial_backbone

    with tempfile.TemporaryDirectory(prefix="raycap-bench-") as scratch:
        root = Path(scratch)
        table = _image_table(images, count, root)
        threads = threads or os.cpu_count() or 1
        overrides = [
            f"storage={root}",
            f"backbone={{name: swin_tiny_patch4_window7_224, weights: none, image_size: {image_size}}}",
            f"features.batch_size={batch_size}",
            f"features.rows_per_shard={batch_size}",
            f"features.threads_per_actor={threads}",
            "features.max_images_for_tasks=0",
        ]
        config = load_config(package_folder() / "configs" / "demo.yaml", overrides)
        weights = root / "backbone.safetensors"
        save_weights(initial_backbone(config), weights)
        dtype = in_new_process(measure_extraction, config.backbone, config.features).fastest
        settings = config.features.model_copy(update={"compute_dtype": dtype})
        extractor = Extractor(config.backbone, weights, settings, config.data.max_pixels)
        print(f"{len(table)} images, swin_tiny at {image_size} px, batches of {batch_size}, {dtype}, {threads} threads")
        plain_before = in_new_process(_plain_loop_rate, extractor, table)
        start_ray(config, address=None)
        ray_data = _ray_data_rate(table, root / "ray", extractor)
        ray.shutdown()
        plain_after = in_new_process(_plain_loop_rate, extractor, table)
    print(f"plain loop   {plain_before:.1f} and {plain_after:.1f} images/s, before and after")
    print(f"Ray Data     {ray_data:.1f} images/s")
    print(f"ratio        {ray_data / ((plain_before + plain_after) / 2):.3f}")


def _image_table(folder: Path | None, count: int, scratch: Path) -> pa.Table:
    """A table with the content keys and paths of `count` images from a folder, or of noise images if it is None."""
    if folder is None:
        folder = scratch / "images"
        folder.mkdir()
        for number, data in enumerate(noise_jpegs(count, rows=60, columns=80)):
            (folder / f"{number}.jpg").write_bytes(data)
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))[:count]
    keys = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    return pa.table({"key": keys, "uri": [str(path) for path in paths]})


def _plain_loop_rate(extractor: Extractor, table: pa.Table) -> float:
    """Images per second of a loop that decodes, resizes and computes one batch after the other in one thread."""
    writer = ShardWriter(storage_path(extractor.weights.parent / "plain"), extractor)

    def extract(part: list[str]) -> None:
        images = (decode_image(Path(uri).read_bytes(), extractor.max_pixels) for uri in part)
        writer.features(np.stack([writer.transform.resize(image) for image in images]))

    size, uris = writer.settings.batch_size, table["uri"].to_pylist()
    writer.thread.submit(extract, uris[:size]).result()  # the first batch is not timed
    begin = time.monotonic()
    for start in range(size, len(uris), size):
        writer.thread.submit(extract, uris[start : start + size]).result()
    return (len(uris) - size) / (time.monotonic() - begin)


def _ray_data_rate(table: pa.Table, folder: Path, extractor: Extractor) -> float:
    """Images per second through Ray Data, from the first finished shard to the last."""
    for _ in compute(table, storage_path(folder), extractor):
        pass
    assert len(FeatureStore(folder)) == len(table), "Ray Data lost images"
    ends = sorted(path.stat().st_mtime_ns for path in (folder / "manifest").iterdir())
    return (len(table) - extractor.settings.rows_per_shard) / ((ends[-1] - ends[0]) / 1e9)


if __name__ == "__main__":
    typer.run(bench_extract)
