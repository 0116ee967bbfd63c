"""Local files and folders that appear whole or not at all (written under a temporary name, then renamed), and locks.

One rule for durability: content is flushed to the disk (fsync) before the rename, so that after a power cut the name
holds the old content or the new content, never a part. `durable=False` skips the flush; only caches use it, because
their content can be made again. Neither flushes the rename itself: the last write may be lost, but not half of it.

Temporary names begin with a dot, end in `.tmp` and are unique, so that several processes may write one name. A killed
writer leaves one behind; whoever lists a folder skips hidden names.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path for a writer that takes a path; the file written there replaces `path` when the block ends.

    Makes the folders above `path`. After an error `path` is unchanged and the temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        if durable:
            _flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = True, durable: bool = True) -> Iterator[Path]:
    """An empty temporary folder; it takes the place of `folder` when the block ends.

    An older `folder` is removed only after that; with `replace=False` one that holds anything is an OSError. After an
    error `folder` is unchanged and the temporary folder is gone.
    """
    temporary = _temporary(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if durable:
            for parent, _, names in os.walk(temporary):
                for path in (*(Path(parent) / name for name in names), Path(parent)):
                    _flush(path)
        if replace and folder.exists():
            _exchange(temporary, folder)
        else:
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    with atomic_path(path, durable=durable) as temporary, temporary.open("wb") as file:
        file.write(data)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes UTF-8 and does not change the line ends of `text`."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """One process of this machine at a time; the lock is released with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(temporary: Path, folder: Path) -> None:
    """Replaces `folder` by `temporary`; restores `folder` if that fails."""
    old = _temporary(folder)
    folder.rename(old)
    try:
        temporary.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
