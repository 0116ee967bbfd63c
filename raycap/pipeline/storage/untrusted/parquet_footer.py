"""Reads where the columns of a Parquet file are.

Arrow ends the whole process when it is asked for a column whose footer contradicts itself. The fields are described in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import os
from typing import BinaryIO, NamedTuple

from raycap.pipeline.storage.untrusted.thrift import I32, I64, LIST, STRUCT, Fields, Items, Struct, parse_struct

MAX_FOOTER_BYTES = 2**26  # a footer has some 100 bytes per column and row group
CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
_MAGIC = b"PAR1"


class ColumnChunk(NamedTuple):
    """A leaf column in a row group. The numbers are as the footer states them."""

    codec: str
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int  # 0 without a dictionary


class RowGroup(NamedTuple):
    """A row group; `columns` are its leaves in the schema's order."""

    num_rows: int
    columns: list[ColumnChunk]


def file_size(file: BinaryIO) -> int:
    """The size of an open file in bytes."""
    return file.seek(0, os.SEEK_END)


def read_row_groups(file: BinaryIO, num_leaves: int) -> list[RowGroup]:
    """The row groups of a Parquet file with so many leaf columns. Raises ValueError."""
    size = file_size(file)
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or not 0 < length <= size - 8:
        raise ValueError("it has no footer")
    if length > MAX_FOOTER_BYTES:
        raise ValueError(f"its footer has {length} bytes, and the limit is {MAX_FOOTER_BYTES}")
    file.seek(size - 8 - length)
    try:
        footer, _ = parse_struct(file.read(length), 0, _FOOTER)
        groups: list[RowGroup] = footer.get((LIST, 4), [])
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its footer is damaged") from error
    if any(len(group.columns) != num_leaves or group.num_rows < 0 for group in groups):
        raise ValueError("its footer contradicts its schema")
    return groups


def _column(chunk: Struct) -> ColumnChunk:
    fields = chunk[STRUCT, 3]
    codec = fields[I32, 4]
    sizes = (fields[I64, 7], fields[I64, 9], fields.get((I64, 11), 0))
    if min(sizes) < 0 or not 0 <= codec < len(CODECS):
        raise ValueError("its footer has a negative size or an unknown compression")
    return ColumnChunk(CODECS[codec], *sizes)


_CHUNK: Fields = {(STRUCT, 3): {(I32, 4): {}, (I64, 7): {}, (I64, 9): {}, (I64, 11): {}}}
_GROUP: Fields = {(I64, 3): {}, (LIST, 1): Items(_CHUNK, _column)}
_FOOTER: Fields = {(LIST, 4): Items(_GROUP, lambda group: RowGroup(group[I64, 3], group[LIST, 1]))}
