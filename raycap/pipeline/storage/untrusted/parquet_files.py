"""Reads Parquet files that strangers may have written: rows of small columns, and the contents of images.

A child process parses the files with limits of memory and time (`parquet_child`), because a damaged file can end the
process that parses it. If the child cannot read a file, a UserError begins with the file's name. Errors of the storage
are raised unchanged.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line

if TYPE_CHECKING:
    import pyarrow as pa

MAX_GROUP_BYTES = 2**29  # of images in a row group; the child makes up to four copies in its memory
_CHILD = Path(__file__).with_name("parquet_child.py")


class RowPlace(NamedTuple):
    """The place of a value: its row group, its row in the group, and the number of its leaf column."""

    group: int
    row: int
    leaf: int


class BinaryColumn(NamedTuple):
    """A column that contains files. leaf: the number of its leaf column. names: the column of file names, or None."""

    leaf: int
    names: str | None


class ParquetFile:
    """An open Parquet file. name: begins the messages of errors."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        _, found = self._ask({"kind": "describe"})
        self.columns: list[str] = found["columns"]
        self.num_rows_of_groups: list[int] = found["groups"]
        self._binary = {column: BinaryColumn(*values) for column, values in found["binary"].items()}

    def binary_column(self, name: str) -> BinaryColumn | None:
        """The column of this name if it contains files, else None.

        Such a column has values of bytes, or structs with `bytes` and maybe `path`, as Hugging Face writes them.
        """
        return self._binary.get(name)

    def rows(self, columns: Sequence[str]) -> Iterator[Values]:
        """Yields the rows. columns: the names of the columns to read, or of parts of columns, such as image.path."""
        batches, _ = self._ask({"kind": "rows", "columns": list(columns)})
        for batch in batches:
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError as error:
                raise UserError(f"{self.name} has a text that is not UTF-8: {error}; write it again") from error

    def places(self, column: BinaryColumn) -> Iterator[RowPlace]:
        """Yields the place of each row's value in a column that contains files."""
        for group, count in enumerate(self.num_rows_of_groups):
            yield from (RowPlace(group, row, column.leaf) for row in range(count))

    def values(self, group: int, leaf: int) -> pa.LargeBinaryArray:
        """All values of a leaf column of bytes in a row group. Raises UserError above MAX_GROUP_BYTES."""
        batches, _ = self._ask({"kind": "values", "group": group, "leaf": leaf, "most": MAX_GROUP_BYTES})
        return batches[0].column(0)

    def _ask(self, task: Values) -> tuple[list[pa.RecordBatch], Values]:
        try:
            return _child(os.getpid()).ask(self.file, task)
        except ValueError as error:
            raise UserError(f"{self.name} is not a readable Parquet file: {one_line(error)}") from error


class _Child:
    """The child process, which executes one task at a time. If the child has died, the next task starts a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    def ask(self, file: BinaryIO, task: Mapping[str, object]) -> tuple[list[pa.RecordBatch], Values]:
        """Sends a task about a file to the child. Returns the task's record batches and its other results.

        Raises ValueError if the child cannot parse the file or has died, and OSError if the file cannot be read.
        """
        import pyarrow as pa

        with self._lock:
            if self._process is None:
                self._start()
            batches: list[pa.RecordBatch] = []
            try:
                self._pipe.send_bytes(json.dumps({**task, "size": file.seek(0, os.SEEK_END)}).encode())
                while True:
                    kind, content = self._received(), self._received()
                    if kind == b"R":
                        start, length = json.loads(content)
                        file.seek(start)
                        self._pipe.send_bytes(file.read(length))
                    elif kind == b"B":
                        batches += pa.ipc.open_stream(content)
                    else:
                        break
            except BaseException as error:  # the child has ended, or still waits for an answer
                self.stop()
                if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
                    raise ValueError("its reader ended, by a limit of memory or time or by damage") from error
                raise
        if kind == b"E":
            raise ValueError(content.decode())
        return batches, json.loads(content)

    def _received(self) -> bytes:
        """The child's next message. Raises EOFError if the child has ended, even in the middle of a message."""
        try:
            return self._pipe.recv_bytes()
        except OSError as error:
            raise EOFError(str(error)) from error

    def _start(self) -> None:
        self._pipe, other = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        other.close()

    def stop(self) -> None:
        """Kills the child if there is one."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
            self._process = None


@cache
def _child(_: int) -> _Child:
    """This process's child. The argument is the process's number, so that a forked process starts its own child."""
    return _Child()
