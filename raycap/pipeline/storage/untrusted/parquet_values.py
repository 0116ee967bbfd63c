"""Reads single values of a Parquet column of bytes: a page is read by its range, decompressed and taken apart.

Arrow reads whole row groups, which may have gigabytes of images. https://parquet.apache.org/docs/file-format/data-pages
describes the pages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raycap.pipeline.storage.untrusted.parquet_pages import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DICTIONARY_PAGE,
    ENCODINGS,
    IS_COMPRESSED,
    LEVEL_BYTES,
    MAX_HEADER_BYTES,
    REPETITION_BYTES,
    Page,
    parse_page,
)
from raycap.pipeline.storage.untrusted.thrift import varint

MAX_PAGE_BYTES = 2**30  # Arrow writes pages of up to 1,024 values, whatever their size
MAX_PAGE_VALUES = 2**22  # Arrow writes row groups of up to 2**20 rows
CODECS = ("snappy", "gzip", "brotli", "lz4_raw", "zstd")  # as Parquet and Arrow name them
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8  # encodings


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
