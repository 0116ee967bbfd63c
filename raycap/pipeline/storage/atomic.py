"""Writes local files and folders atomically, and locks files.

A file is written under a temporary name and flushed to the disk (fsync). Then it is renamed, and its folder is flushed.
A power cut therefore leaves the old content or the new content, never a part of one. The flushes also keep the order of
changes: for example, a stage's result is on the disk before its checkpoints are removed. With `durable=False` nothing
is flushed, for content that can be made again.

Temporary names begin with a dot, end in `.tmp` and are unique, so that several processes may write the same file. A
killed writer leaves its temporary file behind, so code that lists a folder must skip hidden names.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.untrusted.documents import open_regular_file, read_regular_file


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path. When the block ends, the file at the temporary path replaces `path`.

    Makes the folders above `path`. After an error `path` is unchanged, and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        if durable:
            _flush(temporary)
        temporary.replace(path)
        if durable:
            _flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = True, durable: bool = True) -> Iterator[Path]:
    """Yields an empty temporary folder. When the block ends, the temporary folder replaces `folder`.

    With `replace=False`, an existing `folder` that is not empty raises OSError. If `folder` is a link, the link is
    replaced, and what it leads to is unchanged. After an error `folder` is unchanged, and the temporary folder is
    removed.
    """
    temporary, replaced = _temporary(folder), _temporary(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if durable:
            for path in (temporary, *temporary.rglob("*")):
                _flush(path)
        if replace and folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        if replaced.is_symlink():
            replaced.unlink()
        shutil.rmtree(replaced, ignore_errors=True)
        if durable:
            _flush(folder.parent)
    except BaseException:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    with atomic_path(path, durable=durable) as temporary, temporary.open("wb") as file:
        file.write(data)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a text as UTF-8. Its line ends are not translated."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Reads a JSON file that `write_json` wrote. Raises DamagedError if the file is cut or is not JSON."""
    return decode_json(read_regular_file(path), str(path))


def is_disk_full(error: Exception) -> bool:
    """True if a disk or a quota is full, so that another attempt on this machine would fail as well."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def decode_json(data: bytes, name: str) -> Any:
    """Parses the content `data` of a JSON file. name: the file, for errors. Raises DamagedError if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is damaged: {error if data else 'it is empty'}") from error


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Locks the file `path` during the block. Waits until no other process of this machine has the lock.

    The system releases the lock of a killed process. shared: if true, processes with shared locks do not exclude each
    other, but a process with an exclusive lock excludes all of them.
    """
    with _opened_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@contextmanager
def try_file_lock(path: Path) -> Iterator[bool]:
    """Locks the file `path` during the block without waiting. Yields False if another process has the lock."""
    with _opened_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _opened_lock(path: Path) -> BinaryIO:
    """Opens the file of a lock, and never changes its content. Raises OSError for a link, which could lead anywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open_regular_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def _temporary(path: Path) -> Path:
    """A new temporary name beside `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _flush(path: Path) -> None:
    """Waits until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        is_unsupported = error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
        if not (path.is_dir() and is_unsupported):  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def require_writable(name: str, folder: Path, remedy: str = "correct its permissions or give another folder") -> None:
    """Raises UserError if no file can be created in a folder, or if the folder does not exist and cannot be made.

    name: the key or option that sets the folder.
    """
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".raycap-", dir=existing):  # permission bits can be wrong, as in /proc
            pass
    except OSError as error:
        raise UserError(f"{name}: {shown(folder)} cannot be written ({error.strerror}); {remedy}") from error
