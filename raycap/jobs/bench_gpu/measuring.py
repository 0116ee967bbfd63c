"""Measures the time and memory of a computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from raycap.pipeline.runtime.processor import memory_mb

GROUPS = 3  # groups of calls that are timed
GROUP_S = 0.5  # approximate seconds of a group
Result = TypeVar("Result")


def measure(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The seconds per call, and the peak of allocated memory in GiB.

    After two calls to warm up, GROUPS groups of calls are timed. The result is the median of their seconds per call.
    The time of a group includes its work on a GPU. With --rehearse, on the CPU, a group is one call.
    """
    for _ in range(2):
        timed(call, device)
    size = 1
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _, single = timed(call, device)
        size = max(1, min(50, round(GROUP_S / single)))

    def group() -> None:
        for _ in range(size):
            call()

    seconds = statistics.median(timed(group, device)[1] for _ in range(GROUPS)) / size
    return seconds, memory_mb(device) / 1024


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU, the seconds include the work that the call has queued."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin
