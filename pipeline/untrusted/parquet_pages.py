"""Reads the page headers of Parquet columns, which state what the pages take when they are decompressed.

Arrow allocates what a page header states, and a page cannot decompress to more. The footer's sizes are statements that
nothing checks. Page headers are structs of Thrift's compact protocol:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PAGE_BYTES = 256  # counted for each page, so that very many empty pages are too large
MAX_NESTING = 8  # of a page header's structs; 3 are in use
_I32, _STRUCT = 5, 12  # types
UNCOMPRESSED_SIZE, COMPRESSED_SIZE = (_I32, 2), (_I32, 3)  # fields of a page header
PAGE_KINDS = ((_STRUCT, 5), (_STRUCT, 7), (_STRUCT, 8))  # its fields: a data page, a dictionary, a data page version 2
NUM_VALUES = (_I32, 1)  # a field of each of them
_FIXED_SIZES = {3: 1, 7: 8}  # bytes of a byte and a double
Struct = dict[tuple[int, int], Any]  # {(type, field): an integer of 32 bits or a struct}, without other types


def sum_pages(data: bytes, metadata: pq.FileMetaData, columns: Sequence[int], max_bytes: int) -> tuple[int, int]:
    """The bytes of all pages of these leaf columns, decompressed, and the largest number of values of a column.

    Ends at the page with which the bytes are more than `max_bytes`. Raises ValueError for headers that cannot
    be read, and for columns or row groups that overlap, because the same pages would be read for each of them.
    """
    total, most, unread = 0, 0, len(data)
    for column in columns:
        num_values = 0
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(column)
            unread -= chunk.total_compressed_size
            if unread < 0:
                raise ValueError("its columns or row groups overlap")
            for num_bytes, count in _pages(data, chunk):
                total, num_values = total + num_bytes + PAGE_BYTES, num_values + count
                if total > max_bytes:
                    return total, max(most, num_values)
        most = max(most, num_values)
    return total, most


def _pages(data: bytes, column: pq.ColumnChunkMetaData) -> Iterator[tuple[int, int]]:
    """The bytes, decompressed and with its header, and the number of values of each page of a column in a row group."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    end = start + column.total_compressed_size
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"a column has the bytes {start} to {end} of {len(data)}")
    while start < end:
        try:
            header, place = _struct(data, start)
        except IndexError:
            raise ValueError("a page header does not end") from None
        sizes = header.get(UNCOMPRESSED_SIZE, -1), header.get(COMPRESSED_SIZE, -1)
        counts = [header[kind].get(NUM_VALUES, 0) for kind in PAGE_KINDS if kind in header]
        if min(*sizes, *counts) < 0:
            raise ValueError("a page has no size, or a negative one")
        yield place - start + sizes[0], sum(counts)
        start = place + sizes[1]


def _struct(data: bytes, place: int, nesting: int = 0) -> tuple[Struct, int]:
    """The struct at a place in the data, and the place after it. IndexError if the data ends before."""
    values: Struct = {}
    field = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            field += head >> 4
        else:
            number, place = _varint(data, place)
            field = _signed(number)
        kind = head & 15
        if kind in (1, 2):  # true and false have no bytes
            continue
        value, place = _value(data, place, kind, nesting)
        if kind in (_I32, _STRUCT):
            values[kind, field] = value
    return values, place + 1


def _value(data: bytes, place: int, kind: int, nesting: int) -> tuple[Any, int]:
    """The integer or struct at a place, None for any other kind of value, and the place after it."""
    if nesting > MAX_NESTING:
        raise ValueError("a page header is nested too deeply")
    if kind in (4, _I32, 6):
        number, place = _varint(data, place)
        return _signed(number), place
    if kind == _STRUCT:
        return _struct(data, place, nesting + 1)
    if kind == 8:  # text or bytes
        length, place = _varint(data, place)
        return None, place + length
    if kind in (9, 10):  # a list or set
        count, kind_of_items, place = data[place] >> 4, data[place] & 15, place + 1
        if count == 15:
            count, place = _varint(data, place)
        for _ in range(count):
            if place >= len(data):
                raise IndexError
            place = place + 1 if kind_of_items in (1, 2) else _value(data, place, kind_of_items, nesting + 1)[1]
        return None, place
    if kind not in _FIXED_SIZES:  # maps are in no page header
        raise ValueError(f"a page header has a field of type {kind}")
    return None, place + _FIXED_SIZES[kind]


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The unsigned integer at a place, 7 bits per byte, and the place after it."""
    number, shift = 0, 0
    while data[place] & 128:
        number |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if shift > 63:
            raise ValueError("a page header has a number of more than 64 bits")
    return number | data[place] << shift, place + 1


def _signed(number: int) -> int:
    """The signed integer with this zigzag code."""
    return (number >> 1) ^ -(number & 1)
