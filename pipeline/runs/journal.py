"""The run's journal: metrics as JSON lines, written by rank 0, followed by the driver.

The journal is the truth: the terminal, the tracker and the report are fed from it, so that a tracker that is down
costs training nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import write_text

JOURNAL_EVERY_S = 3.0  # how often a run on S3 sends its journal, and the driver fetches it


class Journal:
    """Appends entries; opening it for a stage at a step drops that stage's later entries (they will come again)."""

    def __init__(self, path: Path, stage: str, step: int) -> None:
        kept = [entry for entry in read_journal(path) if entry["stage"] != stage or entry["step"] <= step]
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))
        self.path, self.stage = path, stage

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        entry = {"stage": self.stage, "kind": kind, "step": step, "time": round(time.time(), 3), **values}
        with self.path.open("a") as file:  # one line, one write: a reader never sees half of two
            file.write(json.dumps(entry) + "\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole entries; a line that a killed writer cut short is left out."""
    return list(_entries(path.read_text())) if path.is_file() else []


def _entries(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class Follower:
    """Entries that are new since the last look, also when the journal was rewritten by a resumed stage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: set[tuple[str, str, int, float]] = {_name(entry) for entry in read_journal(path)}
        self._changed = (0, 0)

    def new(self) -> list[dict[str, Any]]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        if (status.st_size, status.st_mtime_ns) == self._changed:
            return []
        self._changed = (status.st_size, status.st_mtime_ns)
        fresh = [entry for entry in read_journal(self.path) if _name(entry) not in self.seen]
        self.seen.update(_name(entry) for entry in fresh)
        return fresh


def _name(entry: dict[str, Any]) -> tuple[str, str, int, float]:
    # a step that a resumed stage repeats is not new; what it has to say, at the same step again, is
    return entry["stage"], entry["kind"], entry["step"], entry["time"] if "text" in entry else 0.0
