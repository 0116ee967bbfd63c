"""Keeps local copies of folders on S3, for programs to read. If a copy and S3 differ, S3 is right.

Each part of a folder has one writer at a time: the driver, or rank 0 of a stage. The writer pushes its part to S3, and
other processes pull that part.
A marker file shows that a folder is complete. Markers are uploaded last and removed first, so that nobody reads half a
checkpoint. A push or pull costs one listing and one transfer per changed file.

Copies of runs, searches and bundles that nobody has used for a week are removed. A search removes the copies of a trial
when the trial ends. A removed copy is downloaded again when it is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from raycap.pipeline.runtime.names import relative_name
from raycap.pipeline.storage.atomic import atomic_path, file_lock, try_file_lock, write_text
from raycap.pipeline.storage.path import Entry, StoragePath, cache_folder, join
from raycap.pipeline.storage.s3 import StorageError

MARKERS = ("progress.json", "run.json", "DONE.json", "COMPLETE.json", "COMPLETE")
RECORD_SUFFIX = ".mirror.json"
NUM_TRANSFERS = 8  # files transferred at the same time
PULL_ATTEMPTS = 3  # a pull starts again if the folder's writer removes files meanwhile, such as old checkpoints

# The transferred files, {name: [tag on S3, [size in bytes, modification time in ns] of the copy]}.
Record = dict[str, list[Any]]
COPIES = ("storage", "workers", "bundles")  # the folders of the cache that contain copies
UNUSED_FOR_S = 7 * 86400.0  # a week, because some readers of a copy, such as `raycap evaluate`, do not lock it


@dataclass(frozen=True)
class Mirror:
    """The copy `local` of the folder `home` on S3. A file beside the copy records the transferred files."""

    home: StoragePath
    local: Path

    def pull(
        self,
        under: str = "",
        only: Collection[str] | None = None,
        check: Callable[[Mapping[str, Entry]], None] = lambda _: None,
    ) -> None:
        """Makes the copy below `under` equal to S3. `under` is a folder, a file with a suffix, or "" for everything.

        only: the names of the files to copy, by default all. check: called with the outdated files before they are
        downloaded, and may raise an error. Hidden files and checkpoints without a marker are not copied. If the
        folder's writer removes files meanwhile, the folder is listed again. Raises StorageError if S3 fails or if files
        are removed in every attempt, and UserError if the name of an object leads out of the copy.
        """
        with self._record() as record:
            for _ in range(PULL_ATTEMPTS):
                listed = _without_unfinished(self._listed(under))
                wanted = only or {name for name in listed if _is_visible(name)}
                remote = {name: entry for name, entry in listed.items() if name in wanted}
                if self._pull_listed(under, remote, record, check):
                    return
        raise StorageError(
            f"{join(self.home.uri, under)}: files are removed while they are copied, because another process writes "
            "the folder; try again, or when that process has ended"
        )

    def _pull_listed(
        self, under: str, remote: Mapping[str, Entry], record: Record, check: Callable[[Mapping[str, Entry]], None]
    ) -> bool:
        """Makes the copy below `under` equal to the objects `remote`. Returns False if some were removed meanwhile."""
        for name in remote:
            relative_name(name, self.home.uri)  # raises UserError for a name that leads out of the copy
        files = self._local_files(under)
        outdated = [name for name, each in remote.items() if record.get(name) != [each.tag, files.get(name)]]
        check({name: remote[name] for name in outdated})
        is_complete = _transfer(self._fetch, outdated, record)
        for name in files.keys() - remote.keys():
            (self.local / name).unlink(missing_ok=True)
            record.pop(name, None)
        self._remove_empty_folders(under)
        return is_complete

    def push(self, under: str = "", check_may_write: Callable[[], None] = lambda: None) -> None:
        """Makes S3 below `under` equal to the copy.

        Removes only objects that this copy has pushed or pulled, so that newer objects of other writers remain.
        check_may_write: called before markers are uploaded and objects are removed, and may raise an error.
        """
        with self._record() as record:
            files = self._local_files(under)
            tags = {name: entry.tag for name, entry in self._listed(under).items()}
            known_tags = {name: tag for name, (tag, _) in record.items()}  # the tags at the last transfer
            removed = [name for name, tag in tags.items() if name not in files and known_tags.get(name) == tag]
            changed = [name for name, state in files.items() if record.get(name) != [tags.get(name), state]]
            _transfer(self._send, [name for name in changed if not _is_marker(name)], record)
            check_may_write()
            _transfer(self._send, [name for name in changed if _is_marker(name)], record)
            for name in sorted(removed, key=lambda name: not _is_marker(name)):  # markers first
                (self.home / name).delete()
                record.pop(name, None)

    def _listed(self, under: str) -> dict[str, Entry]:
        """The objects below `under` by name. If `under` has a suffix, only that object, if it exists."""
        is_file = "." in under.rsplit("/", 1)[-1]
        if is_file:
            try:
                return {under: (self.home / under).stat()}
            except FileNotFoundError:
                return {}
        if not under:
            return self.home.list()
        return {f"{under}/{name}": entry for name, entry in (self.home / under).list().items()}

    def _local_files(self, under: str) -> dict[str, list[int]]:
        """{name: [size, modification time]} of the copy's files below `under`."""
        start, states = self.local / under, {}
        for path in [start] if start.is_file() else _visible_files(start):
            with suppress(FileNotFoundError):  # renamed or removed since it was listed
                states[path.relative_to(self.local).as_posix()] = _state(path)
        return states

    def _fetch(self, name: str) -> list[Any] | None:
        """Downloads a file. Returns its entry for the record, or None if the object was removed after the listing."""
        path = self.local / name
        with suppress(FileNotFoundError), atomic_path(path, durable=False) as temporary:
            entry = (self.home / name).download(temporary)
            return [entry.tag, _state(temporary)]
        return None

    def _send(self, name: str) -> list[Any] | None:
        """Uploads a file. Returns its entry for the record, or None if the file was removed after the listing."""
        path = self.local / name
        try:
            state = _state(path)
            return [(self.home / name).upload(path), state]
        except FileNotFoundError:
            if path.exists():
                raise  # the file exists, so the bucket is missing
            return None  # the file was removed, so the next push removes its object

    def _remove_empty_folders(self, under: str) -> None:
        """Removes folders without files from the copy, because S3 has no empty folders."""
        for folder, _, _ in os.walk(self.local / under, topdown=False):
            if not Path(folder).name.startswith("."):
                with suppress(OSError):  # the folder is not empty
                    Path(folder).rmdir()
        self.local.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _record(self) -> Iterator[Record]:
        """Yields the record of transferred files to one process at a time, and saves it even if a transfer fails."""
        self.local.mkdir(parents=True, exist_ok=True)
        record: Record = {}
        with file_lock(self.record_path.with_suffix(".lock")):
            with suppress(FileNotFoundError, ValueError):
                record = json.loads(self.record_path.read_text())
            try:
                yield record
            finally:
                write_text(self.record_path, json.dumps(record), durable=False)

    @property
    def record_path(self) -> Path:
        """The file with the record. Each push or pull writes it, so its time shows when the copy was last used."""
        return self.local.with_name(f".{self.local.name}{RECORD_SUFFIX}")


def _transfer(move: Callable[[str], list[Any] | None], names: Sequence[str], record: Record) -> bool:
    """Transfers files with `move` and records them. `move` returns None for a file that was removed meanwhile.

    Returns True if no file was removed.
    """
    is_complete = True
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        for name, state in zip(names, pool.map(move, names), strict=True):
            if state is None:
                is_complete = False
            else:
                record[name] = state
    return is_complete


def _visible_files(start: Path) -> Iterator[Path]:
    """Yields the files below a folder, except hidden ones, which are unfinished or only for this machine."""
    for folder, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _is_visible(name: str) -> bool:
    """True if copies contain this object. Hidden objects and the folder marks of S3's console are not copied."""
    is_hidden = any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))
    is_folder = not name or name.endswith("/")
    return not is_hidden and not is_folder


def _state(path: Path) -> list[int]:
    """[size in bytes, modification time in ns] of a file. If both are equal to recorded values, it is unchanged."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_marker(name: str) -> bool:
    """True if the file marks its folder as complete."""
    return name.rsplit("/", 1)[-1] in MARKERS


def _without_unfinished(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries, except files of unfinished checkpoints: folders step-<n>/ without a marker."""
    folders = {name: PurePosixPath(name).parent for name in entries}
    complete = {folder for name, folder in folders.items() if _is_marker(name) or not folder.name.startswith("step-")}
    return {name: entry for name, entry in entries.items() if folders[name] in complete}


def prune_copies(keep: Path) -> None:
    """Removes copies that nobody has used for a week. keep: a copy that is needed now."""
    for record in [path for name in COPIES for path in (cache_folder() / name).rglob(f".*{RECORD_SUFFIX}")]:
        copy = record.with_name(record.name.removeprefix(".").removesuffix(RECORD_SUFFIX))
        if copy != keep:
            remove_copy(copy, UNUSED_FOR_S)


def remove_copy(copy: Path, unused_for_s: float) -> None:
    """Removes a local copy if no process has it locked and none has pushed or pulled it for `unused_for_s` seconds.

    Files that were not pushed are lost. The work that made them is repeated from the state on S3.
    """
    record = copy.with_name(f".{copy.name}{RECORD_SUFFIX}")
    with suppress(FileNotFoundError):  # another process removes the copy
        if not copy.is_dir() or time.time() - record.stat().st_mtime < unused_for_s:
            return
        record_lock = record.with_suffix(".lock")  # locked during a push or pull
        with try_file_lock(copy / ".lock") as is_free, try_file_lock(record_lock) as is_idle:
            if not (is_free and is_idle):
                return
            removed = copy.rename(copy.with_name(f".{copy.name}.{uuid.uuid4().hex[:12]}.tmp"))
            record.unlink()
        shutil.rmtree(removed, ignore_errors=True)
