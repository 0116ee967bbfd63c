"""Facts about GPUs, and the time, memory and operations of a computation."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from raycap.pipeline.runtime.processor import memory_mb

GROUPS = 3  # of calls, whose median counts
GROUP_S = 0.5  # roughly the seconds of a group
Result = TypeVar("Result")


@dataclass(frozen=True)
class GpuFacts:
    """A GPU's peak of dense products in 10^12 operations per second by precision, and 10^12 bytes of memory per second.

    From the vendor's data sheets.
    """

    float32: float
    tf32: float
    bfloat16: float
    bandwidth: float

    def peak(self, precision: str) -> float:
        """Operations per second."""
        return float(getattr(self, precision)) * 1e12


# the first name whose words are part of a device's name counts
FACTS = {
    "H200": GpuFacts(67, 494, 989, 4.8),
    "H100 PCIe": GpuFacts(51, 378, 756, 2.0),
    "H100": GpuFacts(67, 494, 989, 3.35),
    "A100": GpuFacts(19.5, 156, 312, 2.0),
    "L40S": GpuFacts(91.6, 183, 362, 0.86),
    "L4": GpuFacts(30.3, 60, 121, 0.3),
    "A10G": GpuFacts(35, 35, 70, 0.6),
}


def facts_of(device: torch.device) -> GpuFacts | None:
    """The facts of a GPU; None for one that the table lacks and for a CPU."""
    if device.type != "cuda":
        return None
    words = f" {re.sub(r'[^A-Za-z0-9]', ' ', torch.cuda.get_device_name(device))} "
    return next((facts for name, facts in FACTS.items() if f" {name} " in words), None)


@dataclass(frozen=True)
class Measured:
    """One call: its seconds, the peak memory in GiB, and its operations, where a product of two numbers counts two."""

    seconds: float
    memory_gib: float
    operations: int


def measure(call: Callable[[], object], device: torch.device, *, warm_up: int = 2, counts: bool = True) -> Measured:
    """Measures a call after `warm_up` others, as the median of groups of calls. A GPU is awaited after each group.

    On a CPU, which only rehearses, a group is one call.

    counts: also count the operations, in one more call. Compiled code has none to count.
    """
    operations = 0
    if counts:
        counter = FlopCounterMode(display=False)
        with counter:
            call()
        operations = counter.get_total_flops()
    for _ in range(warm_up):
        timed(call, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _, single = timed(call, device)
    size = max(1, min(50, round(GROUP_S / single))) if device.type == "cuda" else 1

    def group() -> None:
        for _ in range(size):
            call()

    seconds = statistics.median(timed(group, device)[1] / size for _ in range(GROUPS))
    return Measured(seconds, memory_mb(device) / 1024, operations)


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU the time includes the work that the call has queued there."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin
