"""A folder on S3 and its local copy: the objects on S3 are the truth, programs open the copy.

Each part of a folder has one writer at a time (the driver, or rank 0 of a stage), which pushes it; the others pull.
A marker file shows that a folder is complete: markers are uploaded last and removed first, so that nobody sees half a
checkpoint. A push or pull costs one listing and one transfer per changed file, several at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.storage.atomic import atomic_path, file_lock, write_text
from pipeline.storage.path import Entry, StoragePath

MARKERS = ("progress.json", "run.json", "DONE.json", "COMPLETE.json", "COMPLETE")
TRANSFERS = 8

# Of each file that was transferred: [tag on S3, [size, modification time] of the copy].
Record = dict[str, list[Any]]


@dataclass(frozen=True)
class Mirror:
    """`local` follows `home`; a file beside it records which state of each object it holds."""

    home: StoragePath
    local: Path

    def pull(self, under: str = "") -> None:
        """Makes the copy below `under` (a folder; a file, recognized by its suffix; "" for all) equal to S3.

        Checkpoints without their marker are skipped. Raises StorageError after the last attempt.
        """
        with self._record() as record:
            remote = _complete(self._listed(under))
            outdated = [name for name, entry in remote.items() if not self._is_current(record, name, entry)]
            with ThreadPoolExecutor(TRANSFERS) as pool:
                for name, state in zip(outdated, pool.map(self._fetch, outdated), strict=True):
                    record[name] = state
            for name in self._local_files(under).keys() - remote.keys():
                (self.local / name).unlink(missing_ok=True)
                record.pop(name, None)
            self._remove_empty_folders(under)

    def push(self, under: str = "", allowed: Callable[[], None] = lambda: None) -> None:
        """Makes S3 below `under` equal to the copy: markers are uploaded last and removed first.

        Only objects that this copy has sent or fetched are removed: what another writer has written since then stays.
        `allowed` (the fence) is called before markers are uploaded and anything is removed.
        """
        with self._record() as record:
            files, remote = self._local_files(under), self._listed(under)
            removed = [name for name in remote if name not in files and record.get(name, [""])[0] == remote[name].tag]
            changed = [
                name
                for name, state in files.items()
                if name not in remote or record.get(name) != [remote[name].tag, state]
            ]
            with ThreadPoolExecutor(TRANSFERS) as pool:
                for markers in (False, True):
                    if markers:
                        allowed()
                    names = [name for name in changed if _is_marker(name) is markers]
                    for name, state in zip(names, pool.map(self._send, names), strict=True):
                        if state is not None:
                            record[name] = state
            for name in sorted(removed, key=lambda name: not _is_marker(name)):
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

    def _local_files(self, under: str) -> dict[str, list[int]]:
        """[size, modification time] of the copy's files below `under`."""
        start = self.local / under
        states = {}
        for path in [start] if start.is_file() else _visible_files(start):
            with suppress(FileNotFoundError):  # renamed or removed since it was listed
                states[path.relative_to(self.local).as_posix()] = _state(path)
        return states

    def _is_current(self, record: Record, name: str, entry: Entry) -> bool:
        try:
            return record.get(name) == [entry.tag, _state(self.local / name)]
        except FileNotFoundError:
            return False

    def _fetch(self, name: str) -> list[Any]:
        path = self.local / name
        with atomic_path(path, durable=False) as temporary:
            entry = (self.home / name).download(temporary)
        return [entry.tag, _state(path)]

    def _send(self, name: str) -> list[Any] | None:
        path = self.local / name
        try:
            state = _state(path)
            return [(self.home / name).upload(path), state]
        except FileNotFoundError:
            if path.exists():
                raise  # the bucket is missing
            return None  # removed since it was listed; the next push removes the object

    def _remove_empty_folders(self, under: str) -> None:
        for folder, _, _ in os.walk(self.local / under, topdown=False):
            if not Path(folder).name.startswith("."):
                with suppress(OSError):  # not empty
                    Path(folder).rmdir()
        self.local.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _record(self) -> Iterator[Record]:
        """The record, for one process of a machine at a time; it is saved also when a transfer fails."""
        self.local.mkdir(parents=True, exist_ok=True)
        path = self.local.with_name(f".{self.local.name}.mirror.json")
        with file_lock(path.with_suffix(".lock")):
            try:
                record = json.loads(path.read_text())
            except (FileNotFoundError, ValueError):
                record = {}
            try:
                yield record
            finally:
                write_text(path, json.dumps(record), durable=False)


def _visible_files(start: Path) -> Iterator[Path]:
    """Files below a folder; hidden files and folders are unfinished or local."""
    for folder, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_marker(name: str) -> bool:
    return name.rsplit("/", 1)[-1] in MARKERS


def _complete(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Without the files of checkpoints (step-<n>/) that have no marker: their writer was killed."""
    marked = {str(PurePosixPath(name).parent) for name in entries if _is_marker(name)}
    complete = {}
    for name, entry in entries.items():
        folder = PurePosixPath(name).parent
        if not folder.name.startswith("step-") or str(folder) in marked:
            complete[name] = entry
    return complete
