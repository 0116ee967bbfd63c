"""Time and memory of a call in a process of its own, as a row of a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycap.jobs.bench.measuring import in_new_process


@dataclass(frozen=True)
class Measurement:
    """A row of the table. The numbers are those of a process of its own, in which torch is imported.

    processor_seconds: of all threads. peak_mb: the largest resident memory, in which memory-mapped pages count that
    processes share. private_mb: the resident memory at the end without such pages. requests: to a storage.
    """

    part: str
    rows: int
    seconds: float
    processor_seconds: float
    peak_mb: float
    private_mb: float
    requests: int = 0

    def __str__(self) -> str:
        values = (self.seconds, self.processor_seconds, self.peak_mb, self.private_mb)
        numbers = "".join(f"  {value:>9,.1f}" for value in values)
        return f"{self.part:<22}{self.rows:>12,}{numbers}  {self.requests:>9,}"


HEADER = f"{'part':<22}{'rows':>12}  {'s':>9}  {'CPU s':>9}  {'peak MB':>9}  {'own MB':>9}  {'requests':>9}"


def measured(part: str, rows: int, function: Callable[..., int | None], *arguments: Any) -> Measurement:
    """The time and memory of a call in a new process. The function may return its number of requests."""
    return in_new_process(_measure, part, rows, function, *arguments)


def _measure(part: str, rows: int, function: Callable[..., int | None], *arguments: Any) -> Measurement:
    begin, processor_begin = time.perf_counter(), time.process_time()
    requests = function(*arguments)
    seconds, processor_seconds = time.perf_counter() - begin, time.process_time() - processor_begin
    # getrusage would give the parent's peak where it is larger, because a process inherits it
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, private = (int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
    return Measurement(part, rows, seconds, processor_seconds, peak, private, requests or 0)
