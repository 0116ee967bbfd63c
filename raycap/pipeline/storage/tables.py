"""Arrow tables as Parquet files, whose pages have checksums, and tables and arrays that leave memory as they grow."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.path import StoragePath, cache_folder
from raycap.pipeline.storage.s3 import StorageError

logger = logging.getLogger(__name__)

MAX_TABLE_BYTES = 2**36  # the index of 100 million images has some 10 GB
SPILL_BYTES = 2**25  # of rows that stay in memory
_ALIGNMENT = 64  # bytes, of the batches in a file


def read_table(path: StoragePath, schema: pa.Schema, *, missing_ok: bool = False) -> pa.Table:
    """Reads a Parquet file. A missing file raises FileNotFoundError or, with `missing_ok`, gives an empty table.

    Raises DamagedError for a file that is not a table of this schema.
    """
    try:
        return from_bytes(path.read_bytes(MAX_TABLE_BYTES), schema, str(path))
    except FileNotFoundError:
        if missing_ok:
            return schema.empty_table()
        raise
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        raise DamagedError(f"{path} is damaged: it is {error.strerror}") from error


def read_cache(path: StoragePath, schema: pa.Schema) -> pa.Table:
    """Reads a Parquet file that can be made again. A missing file gives an empty table.

    So does a damaged file, which is named in the log and removed.
    """
    try:
        return read_table(path, schema, missing_ok=True)
    except DamagedError as error:
        logger.warning(f"damaged   {error}; what it held is computed again")
        with suppress(OSError):  # a storage that cannot be written
            path.delete()
        return schema.empty_table()


def write_table(path: StoragePath, table: pa.Table) -> None:
    path.write_bytes(to_bytes(table))


def to_bytes(table: pa.Table) -> bytes:
    """The content of a Parquet file with this table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes, schema: pa.Schema | None, name: str = "the table") -> pa.Table:
    """The table in the content of the Parquet file `name`. Without a schema it has the file's. Raises DamagedError."""
    with _errors_named(name):
        return pq.read_table(pa.BufferReader(data), schema=schema, page_checksum_verification=True)


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Raises DamagedError for the errors of Arrow about the content of a file."""
    try:
        yield
    except (MemoryError, pa.ArrowCancelled):  # the first includes Arrow's own; the file is not at fault
        raise
    except (pa.ArrowException, OSError, TypeError) as error:  # a column of another type raises TypeError
        if isinstance(error, StorageError) or getattr(error, "errno", None):
            raise  # it could not be read
        raise DamagedError(f"{name} is damaged: {' '.join(str(error).split())}") from error


def table_batches(path: StoragePath, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file of any size, some thousand at a time. Raises FileNotFoundError and `DamagedError`."""
    with path.open() as file, _errors_named(str(path)):
        table = pq.ParquetFile(file, page_checksum_verification=True)
        for batch in table.iter_batches(2**16):
            yield batch.select(schema.names).cast(schema)


class TableSpill:
    """Rows that are added a batch at a time: in memory up to SPILL_BYTES, then in a file without a name.

    The file disappears with its process, however that ends, and its rows are memory-mapped. Rows may be divided into
    `parts`, which share the file. All methods raise OSError.
    """

    def __init__(self, schema: pa.Schema, parts: int = 1) -> None:
        self.schema, self.parts = schema, parts
        self._file: IO[bytes] | None = None
        self._mapped: list[list[pa.RecordBatch]] = [[] for _ in range(parts)]
        self._written: list[tuple[int, int, int]] = []  # part, start and length of batches that are not mapped yet
        self._waiting: list[list[pa.RecordBatch]] = [[] for _ in range(parts)]
        self._num_waiting = 0  # bytes

    def append(self, batch: pa.RecordBatch, part: int = 0) -> None:
        self._waiting[part].append(batch)
        self._num_waiting += batch.nbytes
        if self._num_waiting > SPILL_BYTES:
            self._write()

    def _write(self) -> None:
        """Moves the rows in memory to the file."""
        file = self._file = self._file or unnamed_file()
        for part in range(self.parts):
            waiting = self._waiting[part]
            if self.parts > 1:  # their batches are small
                waiting = pa.Table.from_batches(waiting, self.schema).combine_chunks().to_batches()
            for batch in waiting:
                content = batch.serialize()
                start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                file.write(content)
                self._written.append((part, start, len(content)))
            self._waiting[part] = []
        self._num_waiting = 0

    def batches(self, part: int = 0) -> list[pa.RecordBatch]:
        """The rows of a part, in the order in which they were added."""
        if self._file is not None and self._written:
            self._file.flush()
            begin = self._written[0][1] // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            size = self._file.tell() - begin
            content = pa.py_buffer(mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ, offset=begin))
            for number, start, length in self._written:
                batch = pa.ipc.read_record_batch(content.slice(start - begin, length), self.schema)
                self._mapped[number].append(batch)
            self._written = []
        return [*self._mapped[part], *self._waiting[part]]

    def table(self, part: int = 0) -> pa.Table:
        """The rows of a part as a table."""
        return pa.Table.from_batches(self.batches(part), self.schema)


def spilled(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """These rows as a table, memory-mapped unless they are few."""
    spill = TableSpill(schema)
    for batch in batches:
        spill.append(batch)
    return spill.table()


def spilled_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of zeros that can be changed, memory-mapped unless it is small. Raises OSError."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= SPILL_BYTES:
        return np.zeros(shape, dtype)
    with unnamed_file() as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises OSError here, and no signal at a later access
        return np.memmap(file, dtype, "r+", shape=shape)


def unnamed_file() -> IO[bytes]:
    """A temporary file without a name, in the cache folder or, if it cannot be written, the system's temporary one."""
    try:
        return cast("IO[bytes]", tempfile.TemporaryFile(dir=cache_folder()))
    except OSError:
        return cast("IO[bytes]", tempfile.TemporaryFile())
