"""Keeps local copies of folders on S3. Programs open a copy; where the two differ, the objects on S3 count.

Each part of a folder has one writer at a time (the driver, or rank 0 of a stage), which pushes it; the others pull.
A marker file shows that a folder is complete. Markers are uploaded last and removed first, so that nobody reads half a
checkpoint. A push or pull costs one listing and one transfer per changed file.

Copies of runs, searches and bundles are removed when they take more than a share of the disk, beginning with the one
that was used longest ago. A search removes the copies of a trial when the trial ends. A copy in use, or one with a file
that S3 lacks, remains. A removed copy is downloaded again when it is needed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import relative_name
from raycap.pipeline.storage.atomic import atomic_path, file_lock, try_file_lock, write_text
from raycap.pipeline.storage.cache import usable_bytes
from raycap.pipeline.storage.path import Entry, StoragePath, cache_folder, join
from raycap.pipeline.storage.s3 import StorageError, StorageOptions

MARKERS = ("progress.json", "run.json", "DONE.json", "COMPLETE.json", "COMPLETE")
RECORD_SUFFIX = ".mirror.json"
NUM_TRANSFERS = 8  # files transferred at the same time
# S3 may have an object `a` beside `a/b`, and names of 1,024 bytes without a slash.
NO_FILE_NAME = (errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)
PULL_ATTEMPTS = 3  # of a pull whose files the writer removes meanwhile, as it replaces checkpoints

# {file name: [tag on S3, [size, modification time] of the copy]} of the transferred files.
Record = dict[str, list[Any]]
logger = logging.getLogger(__name__)
COPIES_SHARE = 1 / 8  # of the space that copies can use; the two caches may take half of it each
# Some readers of a copy, such as `raycap evaluate`, do not lock it. They have read it this long after their last pull.
UNUSED_FOR_S = 6 * 3600.0
PASS_S = 15.0  # other processes wait for a pass, and each copy of a server that is down takes 10 s
COPIES = ("storage", "workers", "bundles")  # the folders of the cache that contain copies


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

        only: the names of the files to copy; None for all. check: called with the files to fetch before they are
        fetched, and may raise an error. Checkpoints without their marker and hidden files are skipped. When the
        folder's writer removes files meanwhile, the folder is listed again. Raises StorageError like `StoragePath`, and
        UserError for an object whose name leads out of the copy.
        """
        with self._record() as record:
            for _ in range(PULL_ATTEMPTS):
                if self._pull(record, under, only, check):
                    return
        raise StorageError(
            f"{join(self.home.uri, under)}: files are removed while they are copied, because another process writes "
            "the folder; try again, or when that process has ended"
        )

    def _pull(
        self, record: Record, under: str, only: Collection[str] | None, check: Callable[[Mapping[str, Entry]], None]
    ) -> bool:
        """Makes the copy equal to one listing of S3. Returns False if a listed file was removed meanwhile."""
        remote = _without_unfinished(self._listed(under))
        remote = {name: entry for name, entry in remote.items() if (name in only if only else _is_visible(name))}
        for name in remote:
            relative_name(name, self.home.uri)
        start = self.local / under
        self._require_inside(start if start.is_dir() else start.parent)
        files = self._local_files(under)
        outdated = [name for name, entry in remote.items() if record.get(name) != [entry.tag, files.get(name)]]
        check({name: remote[name] for name in outdated})
        is_complete = True
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            for name, state in zip(outdated, pool.map(self._fetch, outdated), strict=True):
                if state is None:
                    is_complete = False
                else:
                    record[name] = state
        for name in files.keys() - remote.keys():
            (self.local / name).unlink(missing_ok=True)
            record.pop(name, None)
        self._remove_empty_folders(under)
        return is_complete

    def push(self, under: str = "", check_may_write: Callable[[], None] = lambda: None) -> None:
        """Makes S3 below `under` equal to the copy.

        Only objects that this copy has sent or fetched are removed; newer objects of other writers remain.
        `check_may_write` is called before markers are uploaded and objects removed, and may raise an error.
        """
        with self._record() as record:
            files, remote = self._local_files(under), self._listed(under)
            tags = {name: entry.tag for name, entry in remote.items()}
            known_tags = {name: tag for name, (tag, _) in record.items()}  # of the transferred objects
            removed = [name for name, tag in tags.items() if name not in files and known_tags.get(name) == tag]
            changed = [name for name, state in files.items() if record.get(name) != [tags.get(name), state]]
            for is_marker in (False, True):
                if is_marker:  # the other files have been sent
                    check_may_write()
                names = [name for name in changed if _is_marker(name) is is_marker]
                with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
                    for name, state in zip(names, pool.map(self._send, names), strict=True):
                        if state is not None:
                            record[name] = state
            for name in sorted(removed, key=lambda name: not _is_marker(name)):  # markers first
                (self.home / name).delete()
                record.pop(name, None)

    def _listed(self, under: str) -> dict[str, Entry]:
        """The objects below `under`, or the object `under` itself, by their names in the folder."""
        if "." in under.rsplit("/", 1)[-1]:  # a file
            try:
                return {under: (self.home / under).stat()}
            except FileNotFoundError:
                return {}
        prefix = f"{under}/" if under else ""
        return {prefix + name: entry for name, entry in (self.home / under if under else self.home).list().items()}

    def _local_files(self, under: str) -> dict[str, list[int]]:
        """The copy's files below `under` by name, each with [size, modification time]."""
        start, states = self.local / under, {}
        for path in [start] if start.is_file() else _visible_files(start):
            with suppress(FileNotFoundError):  # renamed or removed since it was listed
                states[path.relative_to(self.local).as_posix()] = _state(path)
        return states

    def _fetch(self, name: str) -> list[Any] | None:
        """Downloads a file. Returns its entry for the record; None if the object was removed after the listing."""
        path, stored = self.local / name, self.home / name
        self._require_inside(path.parent)
        try:
            with atomic_path(path, durable=False) as temporary:
                entry = stored.download(temporary)
            return [entry.tag, _state(path)]
        except FileNotFoundError as error:
            if error.filename != stored.uri:  # another process has removed the copy's folder
                raise
            return None
        except OSError as error:
            if error.errno not in NO_FILE_NAME:
                raise
            reason = f"cannot be copied to {self.local}: {os.strerror(error.errno)}"
            raise UserError(f"{stored.uri} {reason}; rename or remove the object") from error

    def _require_inside(self, folder: Path) -> None:
        """Raises UserError if a link leads from a folder of the copy to another place."""
        if not folder.resolve().is_relative_to(self.local.resolve()):
            raise UserError(f"{folder} is a link, or below one, that leads out of {self.local}; remove the link")

    def _send(self, name: str) -> list[Any] | None:
        """Uploads a file. Returns its entry for the record; None if the file was removed meanwhile."""
        path = self.local / name
        try:
            state = _state(path)
            return [(self.home / name).upload(path), state]
        except FileNotFoundError:
            if path.exists():
                raise  # the bucket must be missing, because the file exists
            return None  # the file was removed after the listing; the next push removes the object

    def _remove_empty_folders(self, under: str) -> None:
        """Removes folders without files from the copy, because S3 has no empty folders."""
        for folder, _, _ in os.walk(self.local / under, topdown=False):
            if not Path(folder).name.startswith("."):
                with suppress(OSError):  # not empty
                    Path(folder).rmdir()
        self.local.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _record(self) -> Iterator[Record]:
        """The record of transferred files, for one process at a time. It is saved even when a transfer fails."""
        self.local.mkdir(parents=True, exist_ok=True)
        with file_lock(self.record_path.with_suffix(".lock")):
            record = self._read_record()
            try:
                yield record
            finally:
                content = {"home": self.home.uri, "options": asdict(self.home.options), "files": record}
                write_text(self.record_path, json.dumps(content), durable=False)

    @property
    def record_path(self) -> Path:
        """The file with the record. A push or pull writes it, so that its time is that of the copy's last use."""
        return self.local.with_name(f".{self.local.name}{RECORD_SUFFIX}")

    def _read_record(self) -> Record:
        with suppress(FileNotFoundError, ValueError, KeyError):  # without a record, or with one of an older version
            record: Record = json.loads(self.record_path.read_text())["files"]
            return record
        return {}

    @classmethod
    def of_record(cls, path: Path) -> Mirror | None:
        """The copy to which a record belongs; None without a copy."""
        local = path.with_name(path.name.removeprefix(".").removesuffix(RECORD_SUFFIX))
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            if local.is_dir():
                return cls(StoragePath(content["home"], StorageOptions(**content["options"])), local)
        return None

    def size(self) -> int:
        """The size of the copy in bytes."""
        return sum(size for size, _ in self._local_files("").values())

    def remove_copy(self, unused_for_s: float) -> bool:
        """Removes the copy, and returns True, if nothing is lost and nobody uses it.

        All files must be on S3 and unchanged since they were sent or fetched. No process may have locked the folder,
        and the last push or pull must be `unused_for_s` seconds ago.
        """
        record_lock = self.record_path.with_suffix(".lock")
        with try_file_lock(self.local / ".lock") as is_unlocked, try_file_lock(record_lock) as is_idle:
            if not (is_unlocked and is_idle) or time.time() - self.record_path.stat().st_mtime < unused_for_s:
                return False
            record, files = self._read_record(), self._local_files("")
            is_sent = all(record.get(name, [None, None])[1] == state for name, state in files.items())
            if not is_sent or files.keys() - self._listed("").keys():
                return False
            removed = self.local.rename(self.local.with_name(f".{self.local.name}.{uuid.uuid4().hex[:12]}.tmp"))
            self.record_path.unlink()
        shutil.rmtree(removed, ignore_errors=True)
        return True


def _visible_files(start: Path) -> Iterator[Path]:
    """The files below a folder. Hidden files are left out: they are unfinished or only for this machine."""
    for folder, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _is_visible(name: str) -> bool:
    """Whether an object is a file that copies have: not hidden, and no mark of a folder, as S3's console makes it."""
    is_hidden = any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))
    return bool(name) and not name.endswith("/") and not is_hidden


def _state(path: Path) -> list[int]:
    """[size in bytes, modification time in ns], by which a change of a file is noticed."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_marker(name: str) -> bool:
    """Whether a file shows that its folder is complete."""
    return name.rsplit("/", 1)[-1] in MARKERS


def _without_unfinished(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries without those of checkpoints (step-<n>/) that have no marker, because their writer was killed."""
    folders = {name: PurePosixPath(name).parent for name in entries}
    complete = {folder for name, folder in folders.items() if _is_marker(name) or not folder.name.startswith("step-")}
    return {name: entry for name, entry in entries.items() if folders[name] in complete}


def prune_copies(keep: Path) -> None:
    """Removes copies until the others fit the share of the disk. keep: a copy that is needed now.

    Does nothing while another process of this machine removes copies. Ends after PASS_S seconds, because S3 may not
    answer. Files that other processes remove meanwhile end it, too.
    """
    with suppress(FileNotFoundError):
        _prune(keep, time.monotonic() + PASS_S)


def _prune(keep: Path, deadline: float) -> None:
    root = cache_folder()
    with try_file_lock(_lock(root)) as is_alone:
        if not is_alone:
            return
        copies = _copies(root)
        sizes = {copy.local: copy.size() for copy in copies}
        excess = sum(sizes.values()) - int(COPIES_SHARE * usable_bytes(root, sum(sizes.values())))
        for copy in copies:
            if excess <= 0 or time.monotonic() > deadline:
                return
            if copy.local != keep and _remove(copy, UNUSED_FOR_S):
                excess -= sizes[copy.local]
                logger.debug(f"removed   {copy.local}, the copy of {copy.home}")


def remove_copy(copy: Mirror, unused_for_s: float) -> None:
    """Removes a copy that its last user needs no more. See `Mirror.remove_copy` for the cases in which it remains."""
    with suppress(OSError), file_lock(_lock(cache_folder())):
        if copy.local.is_dir():  # otherwise another of its users has removed it, and a lock would create the folder
            _remove(copy, unused_for_s)


@contextmanager
def no_pruning(folder: Path) -> Iterator[None]:
    """Keeps the removals of other processes out of the context if the folder is a copy in the cache."""
    if not folder.is_relative_to(cache_folder()):
        yield
        return
    with file_lock(_lock(cache_folder()), shared=True):
        yield


def _copies(root: Path) -> list[Mirror]:
    """All copies below the cache's folder, beginning with the one that was used longest ago."""
    found = []
    for path in (path for name in COPIES for path in (root / name).rglob(f".*{RECORD_SUFFIX}")):
        with suppress(FileNotFoundError):  # a worker of a newer driver removes the copies of earlier ones
            last_use, copy = path.stat().st_mtime, Mirror.of_record(path)
            if copy is not None:
                found.append((last_use, copy))
    return [copy for _, copy in sorted(found, key=lambda pair: pair[0])]


def _lock(root: Path) -> Path:
    return root / ".copies.lock"


def _remove(copy: Mirror, unused_for_s: float) -> bool:
    """Removes a copy that nobody has used for a time. Returns False if it must remain, or S3 cannot be asked."""
    home = StoragePath(copy.home.uri, copy.home.options.hasty)
    with suppress(OSError):
        return Mirror(home, copy.local).remove_copy(unused_for_s)
    return False
