"""Reads the page headers of Parquet columns, which state what the pages take when they are decompressed.

Arrow allocates what a page header states, and a page cannot decompress to more. The footer's sizes are statements that
nothing checks. The fields of a page header are described in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from raycap.pipeline.storage.untrusted.parquet_footer import ColumnChunk, RowGroup, file_size
from raycap.pipeline.storage.untrusted.thrift import FALSE, I32, STRUCT, Fields, Struct, parse_struct

PAGE_BYTES = 256  # counted for each page, so that very many empty pages are too large
UNCOMPRESSED_SIZE, COMPRESSED_SIZE = (I32, 2), (I32, 3)  # fields of a page header
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2, OTHER_PAGE = (STRUCT, 5), (STRUCT, 7), (STRUCT, 8), (STRUCT, 0)
PAGE_KINDS = (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2)  # fields of a page header
NUM_VALUES = (I32, 1)  # a field of each of them
ENCODINGS = {DATA_PAGE: (I32, 2), DICTIONARY_PAGE: (I32, 2), DATA_PAGE_V2: (I32, 4)}  # a field of each of them
LEVEL_BYTES, REPETITION_BYTES, IS_COMPRESSED = (I32, 5), (I32, 6), (FALSE, 7)  # fields of a data page version 2
MAX_HEADER_BYTES = 2**16  # of a page header; its statistics may hold a lowest and a highest value
_HEADER: Fields = {
    UNCOMPRESSED_SIZE: {},
    COMPRESSED_SIZE: {},
    DATA_PAGE: {NUM_VALUES: {}, ENCODINGS[DATA_PAGE]: {}},
    DICTIONARY_PAGE: {NUM_VALUES: {}, ENCODINGS[DICTIONARY_PAGE]: {}},
    DATA_PAGE_V2: {
        NUM_VALUES: {},
        ENCODINGS[DATA_PAGE_V2]: {},
        LEVEL_BYTES: {},
        REPETITION_BYTES: {},
        IS_COMPRESSED: {},
    },
}


class Page(NamedTuple):
    """A page of a column: where it is in the file, and what its header states."""

    start: int  # offset of its header
    header_bytes: int
    compressed_bytes: int  # of the page after its header
    num_bytes: int  # of the page after its header, decompressed
    kind: tuple[int, int]  # DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 or OTHER_PAGE
    num_values: int
    fields: Struct  # of its kind

    @property
    def length(self) -> int:
        """The bytes in the file, with the header."""
        return self.header_bytes + self.compressed_bytes


def sum_pages(file: BinaryIO, groups: Sequence[RowGroup], columns: Sequence[int], max_bytes: int) -> tuple[int, int]:
    """The bytes of all pages of these leaf columns, decompressed, and the largest number of values of a column.

    Ends at the page with which the bytes are more than `max_bytes`. Raises ValueError for headers that cannot
    be read, and for columns or row groups that overlap, because the same pages would be read for each of them.
    """
    total, most, unread = 0, 0, file_size(file)
    for column in columns:
        num_values = 0
        for group in groups:
            chunk = group.columns[column]
            unread -= chunk.total_compressed_size
            if unread < 0:
                raise ValueError("its columns or row groups overlap")
            for page in read_pages(file, chunk):
                total, num_values = (
                    total + page.header_bytes + page.num_bytes + PAGE_BYTES,
                    num_values + page.num_values,
                )
                if total > max_bytes:
                    return total, max(most, num_values)
        most = max(most, num_values)
    return total, most


def read_pages(file: BinaryIO, column: ColumnChunk) -> Iterator[Page]:
    """The pages of a column in a row group, of which only the headers are read. Raises ValueError."""
    start = column.data_page_offset
    if 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    end, size = start + column.total_compressed_size, file_size(file)
    if not 0 <= start <= end <= size:
        raise ValueError(f"a column has the bytes {start} to {end} of {size}")
    while start < end:
        file.seek(start)
        page = parse_page(file.read(MAX_HEADER_BYTES), start)
        yield page
        start += page.length


def parse_page(data: bytes, start: int = 0) -> Page:
    """The page whose header begins the data. start: the header's offset in its file. Raises ValueError."""
    try:
        header, length = parse_struct(data, 0, _HEADER)
    except IndexError:
        raise ValueError("a page header does not end") from None
    num_bytes, compressed_bytes = header.get(UNCOMPRESSED_SIZE, -1), header.get(COMPRESSED_SIZE, -1)
    kinds = [kind for kind in PAGE_KINDS if kind in header] or [OTHER_PAGE]
    fields = header.get(kinds[0], {})
    counts = [header[kind].get(NUM_VALUES, 0) for kind in PAGE_KINDS if kind in header]
    if min(num_bytes, compressed_bytes, *counts) < 0:
        raise ValueError("a page has no size, or a negative one")
    return Page(start, length, compressed_bytes, num_bytes, kinds[0], sum(counts), fields)
