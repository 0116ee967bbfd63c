"""Reads and writes Arrow tables as Parquet files, with a checksum for each page."""

from __future__ import annotations

import logging
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


def read_cache(path: StoragePath, schema: pa.Schema) -> pa.Table:
    """Reads a Parquet file whose content can be computed again. Returns an empty table if the file is missing.

    If the file is damaged, logs its name, removes it and returns an empty table.
    """
    try:
        return from_bytes(path.read_bytes(), schema, str(path))
    except FileNotFoundError:
        return schema.empty_table()
    except DamagedError as error:
        logger.warning(f"damaged   {error}; what it held is computed again")
        with suppress(OSError):  # the storage may be read-only
            path.delete()
        return schema.empty_table()


def to_bytes(table: pa.Table) -> bytes:
    """Encodes a table as the content of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes, schema: pa.Schema, name: str = "the table") -> pa.Table:
    """Decodes the content of a Parquet file. name: for errors.

    Raises DamagedError if the content is damaged or does not fit the schema.
    """
    try:
        return pq.read_table(pa.BufferReader(data), schema=schema, page_checksum_verification=True)
    except (MemoryError, pa.ArrowCancelled):  # the file is intact; ArrowMemoryError is a MemoryError
        raise
    except (pa.ArrowException, OSError, TypeError) as error:  # a column of another type raises TypeError
        raise DamagedError(f"{name} is damaged: {' '.join(str(error).split())}") from error
