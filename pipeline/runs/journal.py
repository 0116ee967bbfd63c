"""The run's journal: a file of metrics as JSON lines, which rank 0 writes and the driver reads.

The terminal, the tracker and the report read the journal, so that a tracker that is down does not affect training.
Every entry has the keys stage, kind, step and time (seconds since the epoch); its other keys depend on its kind:

    train       metrics of the steps since the previous entry, and `total`, the stage's number of steps
    validation  CIDEr-D, best, seconds
    event, reward, validating, done  text
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.storage.atomic import write_text

JOURNAL_EVERY_S = 3.0  # For a run on S3, the seconds between two uploads of the journal, and between two downloads.

Entry = dict[str, Any]


class Journal:
    """Appends the entries of one stage. The constructor removes its entries after `step`: training repeats these."""

    def __init__(self, path: Path, stage: str, step: int) -> None:
        entries = [entry for entry in read_journal(path) if entry["stage"] != stage or entry["step"] <= step]
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        self.path, self.stage = path, stage

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends an entry of this kind with the current time."""
        entry = {"stage": self.stage, "kind": kind, "step": step, "time": round(time.time(), 3), **values}
        with self.path.open("a") as file:  # one write per line, so that only the last line can be incomplete
            file.write(json.dumps(entry) + "\n")


def read_journal(path: Path) -> list[Entry]:
    """All complete entries; a line that a killed writer left incomplete is skipped."""
    entries: list[Entry] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


class Follower:
    """Returns each new entry once, even when a resumed stage rewrites the journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._returned = {_entry_key(entry) for entry in read_journal(path)}
        self.status = (0, 0)  # size and modification time of the file at the last call of `new`

    def new(self) -> list[Entry]:
        """The entries written since the last call."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        previous, self.status = self.status, (status.st_size, status.st_mtime_ns)
        if self.status == previous:
            return []
        entries = [entry for entry in read_journal(self.path) if _entry_key(entry) not in self._returned]
        self._returned.update(_entry_key(entry) for entry in entries)
        return entries


def _entry_key(entry: Entry) -> tuple[str, str, int, float]:
    """The key by which `Follower` recognizes an entry: it returns only the first of several with equal keys.

    Metrics are compared without their time, because a resumed stage repeats steps with equal metrics. A text that is
    written again at the same step is a new entry.
    """
    return entry["stage"], entry["kind"], entry["step"], entry["time"] if "text" in entry else 0.0
