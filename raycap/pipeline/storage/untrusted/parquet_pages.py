"""Reads the footer, the pages and single values of Parquet files, in bounded memory.

Arrow ends the whole process when it is asked for a column whose footer contradicts itself. It allocates what a page
header states, although a page cannot decompress to more. And it reads whole row groups, which may have gigabytes of
images. So the footer and the page headers are read first, and values of a column of bytes are read page by page: by a
page's range, which is decompressed and taken apart.

https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift describes the structs, which are in
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md, and
https://parquet.apache.org/docs/file-format/data-pages the pages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

I32, I64, LIST, STRUCT = 5, 6, 9, 12  # types
FALSE = 2  # the type of a field that is false, and has no bytes
MAX_NESTING = 8  # of structs and lists; 6 are in use
_FIXED_SIZES = {3: 1, 7: 8}  # bytes of a byte and a double
# {(type, field): an integer, a struct, a list, or True for the types true and false}
Struct = dict[tuple[int, int], Any]
# {(type, field): the fields of a struct, the Items of a list, or nothing for an integer, true or false}
Fields: TypeAlias = "Mapping[tuple[int, int], Fields | Items]"
MAX_FOOTER_BYTES = 2**26  # a footer has some 100 bytes per column and row group
CODEC_NAMES = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4_raw")
_MAGIC = b"PAR1"
_CHUNK: Fields = {(STRUCT, 3): {(I32, 4): {}, (I64, 7): {}, (I64, 9): {}, (I64, 11): {}}}
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
MAX_PAGE_BYTES = 2**30  # Arrow writes pages of up to 1,024 values, whatever their size
MAX_PAGE_VALUES = 2**22  # Arrow writes row groups of up to 2**20 rows
CODECS = ("snappy", "gzip", "brotli", "lz4_raw", "zstd")  # as Parquet and Arrow name them
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8  # encodings


class Items(NamedTuple):
    """The fields of the structs in a list, and what makes an item of each; it may raise any error."""

    fields: Fields
    make: Callable[[Any], Any]


def parse_struct(data: bytes, place: int, fields: Fields, nesting: int = 0) -> tuple[Struct, int]:
    """The struct at a place in the data, and the place after it. IndexError if the data ends before.

    fields: those to keep. The others are skipped, because an item of one byte would take some hundred.
    """
    values: Struct = {}
    field = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            field += head >> 4
        else:
            number, place = varint(data, place)
            field = _signed(number)
        kind = head & 15
        value: Any = True
        if kind not in (1, 2):  # true and false have no bytes
            value, place = _value(data, place, kind, fields.get((kind, field), {}), nesting)
        if (kind, field) in fields:
            values[kind, field] = value
    return values, place + 1


def _value(data: bytes, place: int, kind: int, fields: Fields | Items, nesting: int) -> tuple[Any, int]:
    """The integer, struct or list at a place, None for any other kind of value, and the place after it."""
    if nesting > MAX_NESTING:
        raise ValueError("a header is nested too deeply")
    if kind in (4, I32, I64):
        number, place = varint(data, place)
        return _signed(number), place
    if kind == STRUCT:
        return parse_struct(data, place, {} if isinstance(fields, Items) else fields, nesting + 1)
    if kind == 8:  # text or bytes
        length, place = varint(data, place)
        return None, place + length
    if kind in (LIST, 10):  # or a set
        count, kind_of_items, place = data[place] >> 4, data[place] & 15, place + 1
        if count == 15:
            count, place = varint(data, place)
        items: list[Any] = []
        fields_of_items = fields.fields if isinstance(fields, Items) else {}
        for _ in range(count):
            if place >= len(data):
                raise IndexError
            item, place = (
                (None, place + 1)
                if kind_of_items in (1, 2)
                else _value(data, place, kind_of_items, fields_of_items, nesting + 1)
            )
            if isinstance(fields, Items):
                items.append(fields.make(item))
        return items, place
    if kind not in _FIXED_SIZES:  # Parquet has no maps
        raise ValueError(f"a header has a field of type {kind}")
    return None, place + _FIXED_SIZES[kind]


def varint(data: bytes, place: int) -> tuple[int, int]:
    """The unsigned integer at a place, 7 bits per byte, and the place after it."""
    number, shift = 0, 0
    while data[place] & 128:
        number |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if shift > 63:
            raise ValueError("a header has a number of more than 64 bits")
    return number | data[place] << shift, place + 1


def _signed(number: int) -> int:
    """The signed integer with this zigzag code."""
    return (number >> 1) ^ -(number & 1)


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
    if min(sizes) < 0 or not 0 <= codec < len(CODEC_NAMES):
        raise ValueError("its footer has a negative size or an unknown compression")
    return ColumnChunk(CODEC_NAMES[codec], *sizes)


_GROUP: Fields = {(I64, 3): {}, (LIST, 1): Items(_CHUNK, _column)}
_FOOTER: Fields = {(LIST, 4): Items(_GROUP, lambda group: RowGroup(group[I64, 3], group[LIST, 1]))}


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


class PageValue(NamedTuple):
    """Where a value is: the ranges of its page and of the dictionary in the file, and its number in the page."""

    start: int
    length: int
    dictionary_start: int
    dictionary_length: int  # 0 without a dictionary
    row: int
    codec: str
    max_level: int  # the definition level of a value that is not null


@dataclass(frozen=True)
class Values:
    """The values of a page: a slice (first, end) of `data` for each, or (-1, -1) for null."""

    data: bytes
    spans: np.ndarray  # int64 (values, 2)

    @property
    def num_bytes(self) -> int:
        return len(self.data) + self.spans.nbytes

    def span(self, index: int) -> tuple[int, int] | None:
        """The slice of a value; None for null. Raises IndexError."""
        first, end = self.spans[index].tolist()
        return None if first < 0 else (first, end)


def decode_dictionary(data: bytes, codec: str) -> Values:
    """The values of a dictionary page. data: the page with its header. Raises ValueError."""
    page, content = _decompress(data, codec)
    if page.kind != DICTIONARY_PAGE:
        raise ValueError("a dictionary page is of another kind")
    return Values(content, _plain_spans(content, 0, page.num_values))


def decode_page(data: bytes, codec: str, max_level: int, dictionary: Values | None) -> Values:
    """The values of a data page. data: the page with its header. Raises ValueError."""
    page, content = _decompress(data, codec)
    if page.kind not in (DATA_PAGE, DATA_PAGE_V2):
        raise ValueError("a data page is of another kind")
    levels, place = np.full(page.num_values, max_level), 0
    if page.kind == DATA_PAGE_V2:
        start = page.fields.get(REPETITION_BYTES, 0)
        place = start + page.fields.get(LEVEL_BYTES, 0)
    elif max_level:
        start, place = 4, 4 + int.from_bytes(content[:4], "little")
    if max_level:
        levels = _hybrid(content[start:place], max_level.bit_length(), page.num_values)
    is_valid = levels == max_level
    count, encoding = int(is_valid.sum()), page.fields.get(ENCODINGS[page.kind], _PLAIN)
    if encoding == _PLAIN:
        values, spans = content, _plain_spans(content, place, count)
    elif encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) and dictionary is not None:
        indices = _hybrid(content[place + 1 :], content[place], count) if count else np.empty(0, np.int64)
        if count and indices.max() >= len(dictionary.spans):
            raise ValueError("a value is not in the dictionary")
        values, spans = dictionary.data, dictionary.spans[indices]
    else:
        raise ValueError(f"a page has the encoding {encoding}, which raycap does not read")
    all_spans = np.full((page.num_values, 2), -1, np.int64)
    all_spans[is_valid] = spans
    return Values(values, all_spans)


def uses_dictionary(data: bytes) -> bool:
    """Whether the values of a data page are in the dictionary. data: the page, or its first bytes."""
    page = parse_page(data[:MAX_HEADER_BYTES])
    return page.fields.get(ENCODINGS.get(page.kind, (0, 0)), _PLAIN) in (_PLAIN_DICTIONARY, _RLE_DICTIONARY)


def _decompress(data: bytes, codec: str) -> tuple[Page, bytes]:
    """The header and the decompressed content of a page."""
    import pyarrow as pa

    page = parse_page(data[:MAX_HEADER_BYTES])
    body = memoryview(data)[page.header_bytes : page.length]
    if page.num_values > MAX_PAGE_VALUES:
        raise ValueError(f"a page has {page.num_values} values, and the limit is {MAX_PAGE_VALUES}")
    if page.num_bytes > MAX_PAGE_BYTES:
        raise ValueError(
            f"a page has {page.num_bytes} bytes, and the limit is {MAX_PAGE_BYTES}; write smaller row groups"
        )
    if len(body) != page.compressed_bytes:
        raise ValueError("a page ends too early")
    # the levels of a page of version 2 are not compressed
    plain = 0
    if page.kind == DATA_PAGE_V2:
        plain = page.fields.get(LEVEL_BYTES, 0) + page.fields.get(REPETITION_BYTES, 0)
        if page.fields.get(LEVEL_BYTES, 0) < 0 or not 0 <= plain <= min(len(body), page.num_bytes):
            raise ValueError("a page has levels of a wrong size")
    if codec == "uncompressed" or (page.kind == DATA_PAGE_V2 and IS_COMPRESSED in page.fields) or plain == len(body):
        content = bytes(body)
    elif codec in CODECS:
        try:
            rest = pa.Codec(codec).decompress(body[plain:], page.num_bytes - plain, asbytes=True)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"a page cannot be decompressed: {error}") from error
        content = bytes(body[:plain]) + rest if plain else rest
    else:
        raise ValueError(f"a page is compressed by {codec}, which raycap does not read; write it with snappy or zstd")
    if len(content) != page.num_bytes:
        raise ValueError(f"a page has {len(content)} bytes and states {page.num_bytes}")
    return page, content


def _plain_spans(data: bytes, place: int, count: int) -> np.ndarray:
    """The slices (count, 2) of values, each after its length in 4 bytes, from a place on."""
    if place + 4 * count > len(data):
        raise ValueError("a page ends within its values")
    spans = np.empty((count, 2), np.int64)
    for index in range(count):
        try:
            (length,) = struct.unpack_from("<I", data, place)
        except struct.error:
            raise ValueError("a page ends within its values") from None
        place += 4
        if place + length > len(data):
            raise ValueError("a value is larger than its page")
        spans[index] = place, place + length
        place += length
    return spans


def _hybrid(data: bytes, width: int, count: int) -> np.ndarray:
    """`count` integers of `width` bits in runs and in groups of eight: the encoding RLE / bit-packed hybrid."""
    if width > 32:
        raise ValueError(f"a page has numbers of {width} bits")
    numbers, place, filled = np.zeros(count, np.int64), 0, 0
    try:
        while filled < count:
            head, place = varint(data, place)
            if head & 1:
                size = (head >> 1) * width
                if place + size > len(data):
                    raise ValueError("a page ends within its numbers")
                num_groups = min(head >> 1, -(-(count - filled) // 8))  # a run may be longer than what is left
                packed = np.frombuffer(data, np.uint8, num_groups * width, place)
                bits = np.unpackbits(packed, bitorder="little").reshape(8 * num_groups, width)
                part = np.zeros(8 * num_groups, np.int64)
                for bit in range(width):
                    part |= bits[:, bit].astype(np.int64) << bit
            else:
                size = (width + 7) // 8
                part = np.broadcast_to(
                    int.from_bytes(data[place : place + size], "little"), min(head >> 1, count - filled)
                )
            if not len(part):
                raise ValueError("a page has an empty run")
            part = part[: count - filled]
            numbers[filled : filled + len(part)] = part
            place, filled = place + size, filled + len(part)
    except IndexError:
        raise ValueError("a page ends within its numbers") from None
    return numbers
