"""What the benchmarks share: the median of a call's times, calls in a new process, and options."""

from __future__ import annotations

import io
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer
from PIL import Image

from raycap.jobs.bench_gpu import timed

Threads = Annotated[int | None, typer.Option(min=1, help="Number of torch threads. The default is torch's choice.")]
References = Annotated[
    Path | None, typer.Option(help="A COCO or Karpathy caption file. The default is captions of the demo's scenes.")
]
Result = TypeVar("Result")


def median_seconds(
    call: Callable[[], Result], repeats: int, *, warm_up: int = 0, device: torch.device | None = None
) -> tuple[Result, float]:
    """The last result of `call` and the median of its seconds, after `warm_up` calls that are not measured."""
    runs = [timed(call, device) for _ in range(warm_up + repeats)]
    return runs[-1][0], statistics.median(seconds for _, seconds in runs[warm_up:])


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function in a new process, so that it shares neither memory nor threads with this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def noise_jpegs(count: int, rows: int, columns: int) -> Iterator[bytes]:
    """JPEG files of 640 x 480 pixels, each enlarged smoothly from `rows` x `columns` random colors."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (rows, columns, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()
