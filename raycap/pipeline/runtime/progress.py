"""Progress of long work: a bar where standard error is a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from raycap.pipeline.runtime.log import is_shown

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 5.0  # seconds between two log lines about the progress of one task
logger = logging.getLogger(__name__)


class ProgressBar:
    """A bar below the lines of the log. It is drawn only on a terminal, and only if the log shows INFO records."""

    def __init__(self) -> None:
        self.is_drawn = sys.stderr.isatty() and is_shown(logging.INFO)
        self._progress: Progress | None = None

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Shows `done` of `total`, an estimate of the remaining time, and a note."""
        if not self.is_drawn:
            return
        if self._progress is None:
            self._progress = _start_rich_progress()
        if not self._progress.task_ids:
            self._progress.add_task(label, total=total, completed=done, note=note)
        task = self._progress.task_ids[0]
        if self._progress.tasks[0].description != label:
            self._progress.reset(task, total=total, completed=done, description=label, note=note)
        self._progress.update(task, completed=done, note=note)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _start_rich_progress() -> Progress:
    """Starts to draw a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[note]}")
    progress = Progress(
        *(TextColumn(column, markup=False) if isinstance(column, str) else column for column in columns),
        console=Console(stderr=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # lines for a file or pipe must not be sent to the terminal
    )
    progress.start()
    return progress


@contextmanager
def progress(label: str, total: int, write: Callable[[str], object] | None = None) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` images are done. Yields a function that takes the number of newly finished images.

    Every five seconds a line is logged; while a bar is drawn, only the log file gets it. If `write` is given, the lines
    go to this function instead of the log, and only if no bar is drawn.
    """
    begin = last = time.monotonic()
    done = 0
    with closing(ProgressBar()) as bar:

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            now = time.monotonic()
            rate = done / max(now - begin, 1e-3)  # no division by 0
            bar.update(label, done, total, f"{rate:.1f} images/s")
            if now - last <= LINE_EVERY_S:
                return
            last = now
            line = f"{label}  {done}/{total} images, {rate:.1f} images/s, {(total - done) / rate:.0f} s left"
            if write is None:
                logger.info(line, extra={"has_bar": bar.is_drawn})
            elif not bar.is_drawn and is_shown(logging.INFO):
                write(line)

        yield advance
