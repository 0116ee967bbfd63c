"""Arrow tables as Parquet files."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage.path import StoragePath


def read_table(path: StoragePath, schema: pa.Schema, *, missing_ok: bool = False) -> pa.Table:
    """Reads a Parquet file. A missing file raises FileNotFoundError or, with `missing_ok`, gives an empty table."""
    try:
        return from_bytes(path.read_bytes(), schema)
    except FileNotFoundError:
        if missing_ok:
            return schema.empty_table()
        raise


def write_table(path: StoragePath, table: pa.Table) -> None:
    path.write_bytes(to_bytes(table))


def to_bytes(table: pa.Table) -> bytes:
    """The content of a Parquet file with this table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes, schema: pa.Schema) -> pa.Table:
    """The table in the content of a Parquet file."""
    return pq.read_table(pa.BufferReader(data), schema=schema)
