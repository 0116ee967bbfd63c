"""A folder on S3 and its local copy: what lies on S3 is the truth, the copy is what programs open.

Each part of a folder has one writer at a time (the driver, or rank 0 of a stage), which pushes it; the others pull.
A folder is whole when its marker is there: markers go up last and go away first, so that nobody meets half a
checkpoint. One listing a push or pull, and a transfer for each file that changed, several at a time.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.storage.atomic import atomic_path, write_text
from pipeline.storage.path import PART_BYTES, Entry, StorageError, StoragePath

MARKERS = ("progress.json", "run.json", "DONE.json", "COMPLETE.json", "COMPLETE")
TRANSFERS = 8


@dataclass(frozen=True)
class Mirror:
    """`local` follows `home`; a file beside it remembers which state of each object it holds."""

    home: StoragePath
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

    def push(self, under: str = "", allowed: Callable[[], None] = lambda: None) -> None:
        """Makes what lies on S3 below `under` equal to the copy: markers up last, and away first.

        Only what this copy has sent or fetched goes away: what somebody else has written since then stays. `allowed`
        (the fence) is asked before markers go up and before anything goes away.
        """
        with self._record() as record:
            own, there = self._own(under), self._listed(under)
            gone = [name for name in there if name not in own and record.get(name, [""])[0] == there[name].tag]
            changed = [name for name, state in own.items() if not self._sent(record, name, state, there.get(name))]
            with ThreadPoolExecutor(TRANSFERS) as pool:
                for markers in (False, True):
                    if markers:
                        allowed()
                    names = [name for name in changed if _marks(name) is markers]
                    for name, state in zip(names, pool.map(self._send, names), strict=True):
                        if state is not None:
                            record[name] = state
            for name in sorted(gone, key=lambda name: not _marks(name)):
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
        """[size, mtime] of the copy's files below `under`."""
        start = self.local / under
        found = {}
        for path in [start] if start.is_file() else _files(start):
            with suppress(FileNotFoundError):  # renamed or removed since it was listed
                found[path.relative_to(self.local).as_posix()] = _state(path)
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
        with atomic_path(path, durable=False) as temporary:
            entry = self._download(name, entry, temporary)
        return [entry.tag, _state(path)]

    def _download(self, name: str, entry: Entry, target: Path) -> Entry:
        """Fetches an object whole; returns the state that was fetched, which is later than `entry` for a log."""
        for _ in range(5):
            with target.open("wb") as file:
                for start in range(0, entry.size, PART_BYTES):
                    file.write((self.home / name).read_range(start, min(PART_BYTES, entry.size - start)))
            now = (self.home / name).stat()
            if now == entry:
                return entry
            entry = now
        raise StorageError(f"{self.home / name} changes all the time; is another run writing it?")

    def _send(self, name: str) -> list[Any] | None:
        path = self.local / name
        try:
            state = _state(path)
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if state[0] else b""
        except FileNotFoundError:
            return None  # went away meanwhile; the next push sees to it
        return [(self.home / name).write_bytes(memoryview(data)), state]

    def _drop_empty(self, under: str) -> None:
        for folder, _, _ in os.walk(self.local / under, topdown=False):
            if not Path(folder).name.startswith("."):
                with suppress(OSError):  # not empty
                    Path(folder).rmdir()
        self.local.mkdir(parents=True, exist_ok=True)

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
                write_text(path, json.dumps(record), durable=False)


def _files(start: Path) -> Iterator[Path]:
    """Files below a folder; hidden ones and hidden folders are unfinished, or nobody else's business."""
    for folder, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


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
