"""Arrow tables as Parquet files, in storage or in memory."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage.path import StoragePath


def read_table(where: StoragePath, schema: pa.Schema) -> pa.Table:
    """A Parquet file of the storage. Raises FileNotFoundError."""
    return from_bytes(where.read_bytes(), schema)


def write_table(where: StoragePath, table: pa.Table) -> None:
    """Writes a Parquet file, whole or not at all."""
    where.write_bytes(memoryview(_buffer(table)))


def to_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    return bytes(_buffer(table))


def from_bytes(data: bytes, schema: pa.Schema) -> pa.Table:
    return pq.read_table(pa.BufferReader(data), schema=schema)


def _buffer(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue()
