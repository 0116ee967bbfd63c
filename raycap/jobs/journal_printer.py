"""Shows training progress on the terminal: prints the entries of a run's journal while the workers write them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from raycap.models.config import Values
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import JOURNAL, RunFolder
from raycap.pipeline.runs.journal import JOURNAL_EVERY_S, Follower, journal_bytes

logger = logging.getLogger(__name__)

POLL_S = 0.5  # seconds between two searches for new entries


class JournalPrinter:
    """A context during which a background thread prints new entries of a run's journal."""

    def __init__(self, folder: RunFolder, changed: Callable[[], object] = lambda: None) -> None:
        """changed: called after each change of the journal, even if a resumed stage repeats entries."""
        self.folder = folder
        self.follower = Follower(folder.journal)
        self.rate_start: dict[str, tuple[int, float]] = {}  # by stage: step and time of the last entry with a text
        self._changed = changed
        self._size = journal_bytes(folder.journal)
        self._downloaded_at = time.monotonic()
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._print_repeatedly, name="journal-printer", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._print_new_entries(download=True)

    def _print_repeatedly(self) -> None:
        while not self._stop.wait(POLL_S):
            self._print_new_entries(download=time.monotonic() - self._downloaded_at > JOURNAL_EVERY_S)

    def _print_new_entries(self, *, download: bool) -> None:
        """Prints the entries that were added since the last call. download: True to download a journal on S3 first.

        Raises no error, because training must continue if its progress cannot be printed. Logs only the first error.
        """
        try:
            if download:
                self._downloaded_at = time.monotonic()
                with suppress(OSError, UserError):  # ignored, because a failed download only delays the output
                    self.folder.pull(JOURNAL)
            size = journal_bytes(self.folder.journal)
            if size != self._size:
                self._size = size
                self._changed()
            for entry in self.follower.new():
                (logger.warning if entry["kind"] == "warning" else logger.info)(self.line(entry))
        except Exception as error:
            if not self._has_failed:
                logger.warning(f"journal   {self.folder.journal} cannot be printed: {type(error).__name__}: {error}")
            self._has_failed = True

    def line(self, entry: Values) -> str:
        """A journal entry as a line. The time left is estimated from the speed since the last entry with a text."""
        stage, step = entry["stage"], entry["step"]
        if "text" in entry:
            self.rate_start[stage] = (step, entry["time"])
            return f"{stage}  {entry['text']}"
        if entry["kind"] == "validation":
            score = f"validation CIDEr-D {entry['CIDEr-D']:.4f} (best {entry['best']:.4f})"
            return f"{stage}  step {step}: {score}, {entry['seconds']:.1f} s"
        first_step, first_time = self.rate_start.get(stage, (0, entry["time"]))
        steps_per_s = (step - first_step) / max(entry["time"] - first_time, 1e-3)  # avoids division by 0
        remaining_s = (entry["total"] - step) / steps_per_s if steps_per_s > 0 else 0.0
        parts = [f"{stage}  {step}/{entry['total']}", f"loss {entry['loss']:.4f}"]
        if "reward" in entry:
            parts += [f"reward {entry['reward']:.3f}", f"length {entry['length']:.1f}"]
        parts += [
            f"grad {entry['gradient_norm']:.2f}",
            f"lr {entry['lr']:.2e}",
            f"{entry['images_per_s']:.0f} images/s",
            f"data wait {100 * entry['data_wait']:.0f} %",
            f"{entry['memory_mb']:.0f} MiB",
            f"{format_duration(remaining_s)} left",
        ]
        return "  ".join(parts)


def format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
