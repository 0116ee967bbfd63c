"""A folder on S3 and its local copy: what lies on S3 is the truth, the copy is what programs open.

Each part of a folder has one writer at a time (the driver, or rank 0 of a stage), which pushes it; the others pull.
A folder is whole when its marker is there: markers go up last and go away first, so that nobody meets half a
checkpoint. One listing a push or pull, and a transfer for each file that changed, several at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.storage import Entry, Place, StorageError

MARKERS = ("progress.json", "run.json", "DONE.json", "COMPLETE.json", "COMPLETE")
TRANSFERS = 8


@dataclass(frozen=True)
class Mirror:
    """`local` follows `home`; a file beside it remembers which state of each object it holds."""

    home: Place
    local: Path

    def pull(self, under: str = "") -> None:
        """Makes the copy below `under` (a folder; a file, known by its suffix; "" for all) equal to what lies on S3.

        Checkpoints without their marker are left where they are. Raises StorageError after the last retry.
        """
        with self._record() as record:
            there = _whole(self._listed(under))
            wanted = [name for name, entry in there.items() if not self._holds(record, name, entry)]
            with ThreadPoolExecutor(TRANSFERS) as pool:
                for name, state in zip(wanted, pool.map(self._fetch, wanted, map(there.get, wanted)), strict=True):
                    record[name] = state
            for name in self._own(under).keys() - there.keys():
                (self.local / name).unlink(missing_ok=True)
                record.pop(name, None)
            self._drop_empty(under)

    def push(self, under: str = "") -> None:
        """Makes what lies on S3 below `under` equal to the copy: markers up last, and away first."""
        with self._record() as record:
            own, there = self._own(under), self._listed(under)
            gone = sorted(there.keys() - own.keys(), key=lambda name: not _marks(name))
            changed = [name for name, state in own.items() if not self._sent(record, name, state, there.get(name))]
            with ThreadPoolExecutor(TRANSFERS) as pool:
                for markers in (False, True):
                    names = [name for name in changed if _marks(name) is markers]
                    for name, state in zip(names, pool.map(self._send, names), strict=True):
                        if state is not None:
                            record[name] = state
            for name in gone:
                (self.home / name).delete()
                record.pop(name, None)

    def _listed(self, under: str) -> dict[str, Entry]:
        """Objects below `under`, or the object itself, by their names in the folder."""
        if "." in under.rsplit("/", 1)[-1]:
            try:
                return {under: (self.home / under).stat()}
            except FileNotFoundError:
                return {}
        prefix = f"{under}/" if under else ""
        return {prefix + name: entry for name, entry in (self.home / under if under else self.home).list().items()}

    def _own(self, under: str) -> dict[str, list[int]]:
        """[size, mtime] of the copy's files below `under`; hidden ones and locks are nobody else's business."""
        start = self.local / under
        found = {}
        for path in [start] if start.is_file() else start.rglob("*"):
            name = path.relative_to(self.local).as_posix()
            if not any(part.startswith(".") for part in name.split("/")) and name != "log/lock":
                try:
                    if path.is_file():
                        found[name] = _state(path)
                except FileNotFoundError:  # renamed or removed since it was listed
                    continue
        return found

    def _holds(self, record: dict[str, Any], name: str, entry: Entry) -> bool:
        known = record.get(name)
        try:
            return known is not None and known[0] == entry.tag and known[1] == _state(self.local / name)
        except FileNotFoundError:
            return False

    def _sent(self, record: dict[str, Any], name: str, state: list[int], entry: Entry | None) -> bool:
        known = record.get(name)
        return known is not None and entry is not None and known == [entry.tag, state]

    def _fetch(self, name: str, entry: Entry) -> list[Any]:
        path = self.local / name
        data = (self.home / name).read_bytes()
        if len(data) != entry.size:
            raise StorageError(f"{self.home / name} changed while it was read; is another run writing it?")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
        return [entry.tag, _state(path)]

    def _send(self, name: str) -> list[Any] | None:
        path = self.local / name
        try:
            state = _state(path)
            data = path.read_bytes()
        except FileNotFoundError:
            return None  # went away meanwhile; the next push sees to it
        return [(self.home / name).write_bytes(data), state]

    def _drop_empty(self, under: str) -> None:
        start = self.local / under
        folders = [path for path in start.rglob("*") if path.is_dir()] if start.is_dir() else []
        for path in sorted(folders, reverse=True):
            if not any(path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _record(self) -> Iterator[dict[str, Any]]:
        """What is known of each file, one process of a machine at a time; kept also when a transfer fails."""
        self.local.mkdir(parents=True, exist_ok=True)
        path = self.local.with_name(f".{self.local.name}.mirror.json")
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                record = json.loads(path.read_text())
            except (FileNotFoundError, ValueError):
                record = {}
            try:
                yield record
            finally:
                temporary = path.with_suffix(".tmp")
                temporary.write_text(json.dumps(record))
                temporary.replace(path)


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _marks(name: str) -> bool:
    return name.rsplit("/", 1)[-1] in MARKERS


def _whole(there: dict[str, Entry]) -> dict[str, Entry]:
    """Without the files of checkpoints (step-<n>/) whose marker is not there: their writer was killed."""
    finished = {str(PurePosixPath(name).parent) for name in there if _marks(name)}
    whole = {}
    for name, entry in there.items():
        folder = PurePosixPath(name).parent
        if not folder.name.startswith("step-") or str(folder) in finished:
            whole[name] = entry
    return whole
