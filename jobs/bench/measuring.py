"""How the benchmarks measure: medians of repeated calls, and calls in a process of their own."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


def median_seconds(
    call: Callable[[], Result], repeats: int, *, warm_up: int = 0, wait: Callable[[], Any] = lambda: None
) -> tuple[Result, float]:
    """The last result of `call` and the median of its times, after `warm_up` calls that are not measured.

    wait: returns when an accelerator has finished what the call gave it, such as `torch.cuda.synchronize`.
    """
    if repeats < 1:
        raise ValueError(f"repeats = {repeats}; it must be 1 or more")
    seconds = []
    for _ in range(warm_up + repeats):
        begin = time.perf_counter()
        result = call()
        wait()
        seconds.append(time.perf_counter() - begin)
    return result, statistics.median(seconds[warm_up:])


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function in a new process, so that its memory and threads are its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def percent_changes(ratios: Sequence[float]) -> tuple[str, str]:
    """The median of ratios as a change in percent, and the change of each."""
    changes = [100 * (ratio - 1) for ratio in ratios]
    return f"{statistics.median(changes):+.1f} %", ", ".join(f"{change:+.1f}" for change in changes)


def print_times(times: dict[str, list[float]]) -> None:
    """Prints one line per case: its name, the median in milliseconds, and every value."""
    for name, seconds in times.items():
        values = ", ".join(f"{1e3 * value:.1f}" for value in seconds)
        print(f"{name:<16}{1e3 * statistics.median(seconds):>9.1f}   ({values})")
