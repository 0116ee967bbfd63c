"""Arrow tables as Parquet files, whose pages have checksums."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import DamagedError
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)

MAX_TABLE_BYTES = 2**36  # the index of 100 million images has some 10 GB


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
    try:
        return pq.read_table(pa.BufferReader(data), schema=schema, page_checksum_verification=True)
    except (MemoryError, pa.ArrowCancelled):  # the first includes Arrow's own; the file is not at fault
        raise
    except (pa.ArrowException, OSError, TypeError) as error:  # a column of another type raises TypeError
        raise DamagedError(f"{name} is damaged: {' '.join(str(error).split())}") from error
