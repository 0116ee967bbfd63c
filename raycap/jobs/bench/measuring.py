"""How the benchmarks measure: times of calls, calls in a new process, and images that are the same in every run."""

from __future__ import annotations

import io
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU the time includes the work that the call has queued there."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


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


def percent_changes(ratios: Sequence[float]) -> tuple[str, str]:
    """The median of ratios as a change in percent, and the list of all changes, both as text."""
    changes = [100 * (ratio - 1) for ratio in ratios]
    return f"{statistics.median(changes):+.1f} %", ", ".join(f"{change:+.1f}" for change in changes)


def print_times(times: dict[str, list[float]]) -> None:
    """Prints one line per case: its name, the median in milliseconds, and every value."""
    for name, seconds in times.items():
        values = ", ".join(f"{1e3 * value:.1f}" for value in seconds)
        print(f"{name:<16}{1e3 * statistics.median(seconds):>9.1f}   ({values})")


def noise_jpegs(count: int, rows: int, columns: int) -> Iterator[bytes]:
    """JPEG files of 640 x 480 pixels, each enlarged smoothly from `rows` x `columns` random colors."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (rows, columns, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()
