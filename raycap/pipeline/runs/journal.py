"""The run's journal: metrics as JSON lines, which rank 0 writes and the driver reads.

The terminal, the tracker and the report read the journal. Training writes only the journal, so a tracker that is down
does not stop training. Every entry has the keys stage, kind, step and time (seconds since the epoch), and further keys:

    train       metrics of the steps since the previous entry, and `total`, the stage's number of steps
    validation  CIDEr-D, best, seconds
    event, notice, reward, validating, done  text
    resume      no further keys. Training repeats the later steps, so earlier entries of these steps do not count.

The journal is a folder of parts, 00001.jsonl and so on. Lines are only added, and only to the newest part. So a run on
S3 uploads and downloads at most about PART_BYTES at a time, however long the run trains.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from raycap.models.config import Values
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import open_regular_file, read_regular_file

JOURNAL_EVERY_S = 3.0  # seconds between two uploads or two downloads of a journal on S3
PART_BYTES = 2**18  # A part of this size is full, with about 1,000 entries.

Entry = Values


class Journal:
    """Appends the entries of one stage. Each writer begins a new part, so that no two writers use the same file.

    The first entry has the kind "resume", so earlier entries of the stage after `step` no longer count.
    """

    def __init__(self, folder: Path, stage: str, step: int) -> None:
        self.folder, self.stage = folder, stage
        folder.mkdir(parents=True, exist_ok=True)
        self._unsent: list[Path] = []  # parts that `upload` has not sent completely. The last part gets new lines.
        self._begin_part()
        self.write("resume", step, {})

    def write(self, kind: str, step: int, values: Values) -> None:
        """Appends an entry of this kind with the current time."""
        entry = {"stage": self.stage, "kind": kind, "step": step, "time": round(time.time(), 3), **values}
        with self._unsent[-1].open("a") as file:  # one write per line, so that only the last line can be incomplete
            file.write(json.dumps(entry) + "\n")
            is_full = file.tell() >= PART_BYTES
        if is_full:
            self._begin_part()

    def upload(self, home: StoragePath) -> None:
        """Uploads the parts with new lines to the folder `home`. Only one thread at a time may call this method."""
        for part in self._unsent.copy():
            is_complete = part != self._unsent[-1]  # before the part is read, because another thread may add lines
            (home / part.name).write_bytes(part.read_bytes())
            if is_complete:
                self._unsent.remove(part)

    def _begin_part(self) -> None:
        numbers = [int(part.stem) for part in self.folder.glob("*.jsonl") if part.stem.isdecimal()]
        part = self.folder / f"{max(numbers, default=0) + 1:05}.jsonl"
        part.touch()
        self._unsent.append(part)


def read_journal(folder: Path) -> list[Entry]:
    """All entries except earlier entries of repeated steps. The incomplete last line of a killed writer is skipped."""
    entries: list[Entry] = []
    for part in _parts(folder):
        for entry in _parse(read_regular_file(part)):  # refuses a pipe, because opening it would wait for a writer
            if entry["kind"] == "resume":
                stage, step = entry["stage"], entry["step"]
                entries = [each for each in entries if each["stage"] != stage or each["step"] <= step]
            else:
                entries.append(entry)
    return entries


def journal_bytes(folder: Path) -> int:
    """The size of the journal in bytes, which grows with every entry."""
    return sum(part.stat().st_size for part in _parts(folder))


class Follower:
    """Follows a journal: `new` returns each new entry once, even if a resumed stage repeats the entry's step.

    Each call reads only the lines that were added.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_read: dict[str, int] = {}  # number of bytes read, by part
        self._added_entries()  # so that the next call skips what exists
        self._returned = {_entry_key(entry) for entry in read_journal(folder)}

    def new(self) -> list[Entry]:
        """The entries written since the last call."""
        entries = []
        for entry in self._added_entries():
            key = _entry_key(entry)
            if entry["kind"] != "resume" and key not in self._returned:
                self._returned.add(key)
                entries.append(entry)
        return entries

    def _added_entries(self) -> list[Entry]:
        """The entries in complete lines that were added since the last call."""
        entries = []
        for part in _parts(self.folder):
            start = self._num_read.get(part.name, 0)
            with open_regular_file(part) as file:
                file.seek(start)
                added = file.read()
            complete = added[: added.rfind(b"\n") + 1]
            self._num_read[part.name] = start + len(complete)
            entries += _parse(complete)
        return entries


def _parts(folder: Path) -> list[Path]:
    """The files of a journal in order."""
    return sorted(folder.glob("*.jsonl"))


def _parse(lines: bytes) -> list[Entry]:
    """The entries in complete lines. A line that is not an entry is skipped."""
    entries = []
    for line in lines.splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.keys() >= {"stage", "kind", "step", "time"}:
                entries.append(entry)
    return entries


def _entry_key(entry: Entry) -> tuple[str, str, int, float]:
    """The key by which `Follower` recognizes an entry. `Follower` returns only the first of entries with equal keys.

    The key of metrics has no time, because a resumed stage repeats steps with equal metrics. The key of a text has the
    time, because a text that is written again at the same step is a new entry.
    """
    time_of_text = entry["time"] if "text" in entry else 0.0
    return entry["stage"], entry["kind"], entry["step"], time_of_text
