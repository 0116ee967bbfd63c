"""Reads local files that may be anything: a pipe, a device, or larger than the memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_DOCUMENT_BYTES = 2**30
MAX_UNSIZED_BYTES = 2**20  # of a file whose size is given as 0: an empty one, or one of /proc


def read_document(path: Path) -> bytes:
    """The content of a file of text, JSON or a table. Raises OSError as `read_regular_file`."""
    return read_regular_file(path, MAX_DOCUMENT_BYTES)


def read_regular_file(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a regular file, which a link may lead to.

    Raises OSError for a folder, pipe, socket or device, without waiting for a writer; for a file of more than
    `max_bytes` bytes, whose content takes no memory; and for a file that grows meanwhile.
    """
    with open_regular_file(path) as file:
        if max_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        limit = max_bytes if size else min(max_bytes, MAX_UNSIZED_BYTES)
        if size <= limit:
            expected = size or limit
            data = file.read(expected + 1)  # memory for all of it is taken at once
            if len(data) <= expected:
                return data
            if size:
                raise OSError(errno.EBUSY, "changed while it was read", str(path))
    raise OSError(errno.EMSGSIZE, f"larger than {limit} bytes", str(path))


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file. A text that cannot be a path leads to none."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder. A text that cannot be a path leads to none."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    """The mode of what a path leads to; 0 if it leads to nothing."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # missing, too long, or with a NUL
        return 0


def open_regular_file(path: Path) -> BinaryIO:
    """Opens a regular file, which a link may lead to, for reading. Raises OSError for a folder, pipe or device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    except ValueError as error:  # a NUL, or half a character
        raise OSError(errno.EINVAL, "not the name of a file", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))
