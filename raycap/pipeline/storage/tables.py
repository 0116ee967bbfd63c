"""Arrow tables as Parquet files, whose pages have checksums."""

from __future__ import annotations

import logging
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


def read_cache(path: StoragePath, schema: pa.Schema) -> pa.Table:
    """Reads a Parquet file that can be made again. A missing file gives an empty table.

    A damaged file also gives an empty table. The log names it, and it is removed.
    """
    try:
        return from_bytes(path.read_bytes(), schema, str(path))
    except FileNotFoundError:
        return schema.empty_table()
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
    """The table in the content of a Parquet file. name: for errors. schema: None for the file's own schema.

    Raises DamagedError.
    """
    try:
        return pq.read_table(pa.BufferReader(data), schema=schema, page_checksum_verification=True)
    except (MemoryError, pa.ArrowCancelled):  # the file is not at fault; Arrow's error for memory is a MemoryError
        raise
    except (pa.ArrowException, OSError, TypeError) as error:  # a column of another type raises TypeError
        raise DamagedError(f"{name} is damaged: {' '.join(str(error).split())}") from error
