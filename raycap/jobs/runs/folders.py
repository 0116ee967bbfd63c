"""The folders of a storage, one after the other, with the files in each. Nothing is kept of a folder that was read."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.storage.lease import LeaseRecord
from raycap.pipeline.storage.path import Entry, StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_json, require_mapping

MAX_RECORD_BYTES = 2**26  # of a JSON or YAML file; run.json lists unreadable images
Files = Iterator[tuple[str, Entry]]


def folders(place: StoragePath, depth: int = 1) -> Iterator[tuple[str, Files]]:
    """(name, files) of each folder `depth` levels below a place, sorted by name. Hidden folders are left out.

    The files, with names relative to the folder, must be read before the next folder. One listing on S3.
    """
    if place.is_remote:
        parts = ((name.split("/"), entry) for name, entry in place.walk())
        deep = ((names, entry) for names, entry in parts if len(names) > depth)
        for key, group in groupby(deep, key=lambda item: item[0][:depth]):  # S3 lists names in order
            if not any(name.startswith(".") or not name for name in key):
                yield "/".join(key), (("/".join(names[depth:]), entry) for names, entry in group)
        return
    for name in folder_names(place.path):
        if depth == 1:
            yield name, (place / name).walk()
        else:
            yield from ((f"{name}/{below}", files) for below, files in folders(place / name, depth - 1))


def folder_names(path: Path, *, hidden: bool = False) -> list[str]:
    """The names of a local folder's visible or hidden folders, sorted; none of a missing one. Links do not count."""
    try:
        with os.scandir(path) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in found if name.startswith(".") is hidden)


@dataclass
class Size:
    """The bytes of files, and the time of the newest one (Unix seconds)."""

    bytes: int = 0
    newest: float = 0.0

    def add(self, entry: Entry) -> None:
        self.bytes += entry.size
        self.newest = max(self.newest, entry.modified)

    @classmethod
    def of(cls, files: Files) -> Size:
        size = cls()
        for _, entry in files:
            size.add(entry)
        return size

    def age_days(self) -> float:
        """The days since the last change."""
        return (time.time() - self.newest) / 86400


@dataclass
class Scan:
    """The files of a folder in short: its size, the sizes of its parts, and the names of records.

    parts: sizes by name: of the folders below stages/NAME/, such as stages/xe/step-20, and elsewhere of folders at most
    two levels below. records: the names of .json files and of config.yaml. tops: the first parts of all names.
    """

    size: Size = field(default_factory=Size)
    parts: dict[str, Size] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)
    tops: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, files: Files) -> Scan:
        scan = cls()
        for name, entry in files:
            if name == ".lock":  # who only looks at a folder touches it, too
                scan.tops.add(name)
                continue
            scan.size.add(entry)
            names = name.split("/")
            scan.tops.add(names[0])
            if len(names) > 1:
                depth = 3 if names[0] == "stages" and len(names) > 3 else min(2, len(names) - 1)
                scan.parts.setdefault("/".join(names[:depth]), Size()).add(entry)
            if name.endswith(".json") or name == "config.yaml":
                scan.records.add(name)
        return scan


def read_record(path: StoragePath) -> dict[str, Any]:
    """The mapping in a JSON file. Raises UserError for a damaged or foreign one, and OSError for a missing one."""
    return dict(require_mapping(parse_json(path.read_bytes(MAX_RECORD_BYTES), str(path)), str(path)))


def is_locked(folder: StoragePath) -> bool:
    """Whether a process of this machine works on a local folder. It holds the lock for a moment, as others do."""
    if folder.is_remote:
        return False
    try:
        with (folder.path / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # not readable for this user, so that another one may hold it
        return True
    return False


def is_leased(path: StoragePath) -> bool:
    """Whether the file of a lease names a holder whose time has not expired. A file that is no lease counts as one."""
    try:
        return LeaseRecord.model_validate_json(path.read_bytes(2**16)).until > time.time()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def reason(error: Exception) -> str:
    """An error in one line."""
    return str(error) if isinstance(error, UserError) else one_line(error)
