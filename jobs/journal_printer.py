"""Training progress on the terminal: the entries of a run's journal, printed while the workers write them."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

from pipeline.runs.folder import JOURNAL, RunFolder
from pipeline.runs.journal import JOURNAL_EVERY_S, Follower

logger = logging.getLogger(__name__)

POLL_S = 0.5


class JournalPrinter:
    """Prints new journal entries in a background thread for as long as it is entered as a context."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.follower, self._pulled_at = folder, Follower(folder.journal), time.monotonic()
        self.start: dict[str, tuple[int, float]] = {}  # by stage: the step and the time from which its rate is taken
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="journal-printer", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pull()
        self._print()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            if time.monotonic() - self._pulled_at > JOURNAL_EVERY_S:
                self._pull()
            self._print()

    def _pull(self) -> None:
        with suppress(OSError):  # failing storage delays the output and does not stop the run
            self.folder.pull(JOURNAL)
        self._pulled_at = time.monotonic()

    def _print(self) -> None:
        for entry in self.follower.new():
            logger.info(self.line(entry))

    def line(self, entry: dict[str, Any]) -> str:
        """One journal entry as a line of text; rate and remaining time count from the stage's last event."""
        stage, step = entry["stage"], entry["step"]
        if entry["kind"] in ("event", "done", "reward"):
            self.start[stage] = (step, entry["time"])
            return f"{stage}  {entry['text']}"
        if entry["kind"] == "validation":
            score = f"validation CIDEr-D {entry['CIDEr-D']:.4f} (best {entry['best']:.4f})"
            return f"{stage}  step {step}: {score}, {entry['seconds']:.1f} s"
        first_step, since = self.start.get(stage, (0, entry["time"]))
        steps_per_s = (step - first_step) / max(entry["time"] - since, 1e-3)
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
