"""`raycap bench scale`: time and memory of what grows with the data set, and a model of a cluster with more of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.bench.scale.data import measure_data
from raycap.jobs.bench.scale.keys import measure_keys
from raycap.jobs.bench.scale.measured import HEADER, Measurement
from raycap.jobs.bench.scale.model import Cluster, report
from raycap.jobs.bench.scale.order import measure_order
from raycap.jobs.bench.scale.reward import measure_reward
from raycap.jobs.options import Folder
from raycap.pipeline.errors import UserError

# Each part yields its rows of the table, and may write to the folder.
PARTS: Mapping[str, Callable[[int, Path], Iterator[Measurement]]] = {
    "data": measure_data,
    "keys": measure_keys,
    "order": measure_order,
    "reward": measure_reward,
}
DEFAULTS = Cluster()


def bench_scale(
    folder: Folder = None,
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; by default all.")] = None,
    rows: Annotated[list[float] | None, typer.Option(min=1000, help="Images; by default 1e5.")] = None,
    images: Annotated[
        float | None, typer.Option(min=1e5, help="Also print a model of this many images, from rows / 10 and rows.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Of the modelled cluster.")] = DEFAULTS.nodes,
    images_per_s: Annotated[
        float, typer.Option(min=0.01, help="That the backbone of a modelled node computes.")
    ] = DEFAULTS.images_per_s,
    feature_mb: Annotated[
        float, typer.Option(min=0.001, help="MB per image; 144 x 1536 float16 by default.")
    ] = DEFAULTS.feature_mb,
    cache_gib: Annotated[float, typer.Option(min=0.1, help="Of a modelled node.")] = DEFAULTS.cache_gib,
    latency_ms: Annotated[float, typer.Option(min=0, help="Of a request to the storage.")] = DEFAULTS.latency_ms,
    gbit_per_s: Annotated[float, typer.Option(min=0.01, help="From the storage to a node.")] = DEFAULTS.gbit_per_s,
) -> None:
    """Time and memory of what grows with the data set.

    Every measurement has a process of its own and runs the code of a run. No image is read; each has 5 captions of 8 to
    12 words. A million images need 1.2 GB on the disk. With --images, a model follows: measured seconds and memory
    continued in a straight line, and requests, bytes and prices of the storage.

    Example: raycap bench scale --part data --rows 1e5 --rows 1e6

    Example: raycap bench scale --images 1e8 --nodes 256
    """
    if unknown := set(part or ()) - PARTS.keys():
        raise UserError(f"--part: {', '.join(sorted(unknown))} is unknown; the parts are {', '.join(PARTS)}")
    sizes = [int(count) for count in rows or (1e5,)]
    if images is not None:
        sizes = [max(sizes) // 10, max(sizes)]
    print(f"{os.cpu_count()} processor cores\n{HEADER}", flush=True)
    measured: list[Measurement] = []
    for name in part or PARTS:
        for count in sizes:
            with tempfile.TemporaryDirectory(prefix="raycap-bench-", dir=folder) as scratch:
                for measurement in PARTS[name](count, Path(scratch)):
                    print(measurement, flush=True)
                    measured.append(measurement)
    if images is not None:
        cluster = Cluster(nodes, images_per_s, feature_mb, cache_gib, latency_ms, gbit_per_s)
        print("\n".join(report(measured, int(images), cluster)))
