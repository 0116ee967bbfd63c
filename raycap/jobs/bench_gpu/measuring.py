"""The time, memory and operations of a computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from raycap.pipeline.runtime.processor import memory_mb

GROUPS = 3  # of calls, whose median counts
GROUP_S = 0.5  # roughly the seconds of a group
Result = TypeVar("Result")


@dataclass(frozen=True)
class Measured:
    """One call: its seconds, the peak memory in GiB, and its operations, where a product of two numbers counts two."""

    seconds: float
    memory_gib: float
    operations: int


def measure(call: Callable[[], object], device: torch.device, *, counts: bool = True) -> Measured:
    """Measures a call after two others, as the median of groups of calls. A GPU is awaited after each group.

    On a CPU, which only rehearses, a group is one call. counts: also count the operations, in one more call. Compiled
    code has none to count.
    """
    counter = FlopCounterMode(display=False)
    with counter if counts else nullcontext():
        call()
    timed(call, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _, single = timed(call, device)
    size = max(1, min(50, round(GROUP_S / single))) if device.type == "cuda" else 1
    seconds = statistics.median(timed(lambda: [call() for _ in range(size)], device)[1] / size for _ in range(GROUPS))
    return Measured(seconds, memory_mb(device) / 1024, counter.get_total_flops() if counts else 0)


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU the time includes the work that the call has queued there."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin
