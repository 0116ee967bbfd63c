"""Hostile pages of Parquet files with images are refused in bounded memory."""

from __future__ import annotations

import contextlib
import io
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.images import ImageLocation, forget_pages
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted import parquet_pages
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile
from raycap.pipeline.storage.untrusted.parquet_pages import read_row_groups


def written(**options: Any) -> bytes:
    buffer, random_ = io.BytesIO(), random.Random(0)
    rows = [{"image": {"bytes": random_.randbytes(50), "path": f"{n}"}, "text": "a cat"} for n in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def locations(path: Path) -> list[ImageLocation]:
    dataset, _ = read_annotations(DataSection(root=str(path.parent), annotations=path.name), path.parent)
    return list(map(ImageLocation.parse, dataset.column("uri")))


def test_a_page_bomb_is_not_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"image": pa.array([bytes(2**27)], pa.binary()), "text": ["a cat"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 10**5
    (image,) = locations(path)
    monkeypatch.setattr(parquet_pages, "MAX_PAGE_BYTES", 2**26)
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    with pytest.raises(OSError, match="a page has 1342177.. bytes, and the limit is 67108864"):
        image.read_bytes()
    assert tracemalloc.get_traced_memory()[1] < 2**22 and pa.total_allocated_bytes() - before < 2**22
    tracemalloc.stop()
    monkeypatch.undo()
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        image.read_bytes(1000)
    forget_pages()


def test_a_page_that_states_a_wrong_size_is_refused() -> None:
    codec, content = pa.Codec("zstd"), bytes(1000)
    body = codec.compress(content, asbytes=True)
    for stated in (999, 1001, 10**6):
        data = page_header(stated, len(body)) + body
        with pytest.raises(ValueError, match="a page"):
            parquet_pages.decode_page(data, "zstd", 0, None)
    with pytest.raises(ValueError, match="a page ends too early"):
        parquet_pages.decode_page((page_header(1000, len(body)) + body)[:-1], "zstd", 0, None)
    with pytest.raises(ValueError, match="compressed by lzo, which raycap does not read"):
        parquet_pages.decode_page(page_header(1000, len(body)) + body, "lzo", 0, None)


def varint(value: int) -> bytes:
    digits = bytearray()
    while True:
        value, digit = value >> 7, value & 127
        digits.append(digit | (128 if value else 0))
        if not value:
            return bytes(digits)


def page_header(num_bytes: int, compressed_bytes: int, num_values: int = 1, encoding: int = 0, kind: int = 5) -> bytes:
    """The header of a data or dictionary page in Thrift's compact protocol. kind: its field, 5 or 7."""

    def number(value: int) -> bytes:
        return b"\x15" + varint(2 * value)

    fields = number(0) + number(num_bytes) + number(compressed_bytes) + bytes([(kind - 3) << 4 | 12])
    return fields + number(num_values) + number(encoding) + b"\x15\x06\x15\x06\x00\x00"


def most_memory(call: Callable[[], Any]) -> int:
    """The most bytes that Python allocates in a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_numbers_in_runs_are_those_of_a_decoder_of_single_bits() -> None:
    """Runs of random sizes, the last of them longer than the page."""
    random_, dictionary = random.Random(4), parquet_pages.Values(b"", np.arange(128).reshape(64, 2))
    for _ in range(200):
        width, count = random_.randrange(7), random_.randrange(1, 60)
        content, expected = bytearray([width]), list[int]()
        while len(expected) < count:
            size = random_.randrange(1, 6)
            if random_.random() < 0.5:
                numbers = [random_.getrandbits(width) for _ in range(8 * size)]
                packed = sum(number << (index * width) for index, number in enumerate(numbers))
                content += varint(size << 1 | 1) + packed.to_bytes(size * width, "little")
            else:
                numbers = [random_.getrandbits(width)] * size
                content += varint(size << 1) + numbers[0].to_bytes((width + 7) // 8, "little")
            expected += numbers
        data = page_header(len(content), len(content), count, encoding=8) + content
        values = parquet_pages.decode_page(data, "uncompressed", 0, dictionary)
        assert [values.span(index) for index in range(count)] == [(2 * n, 2 * n + 1) for n in expected[:count]]


@pytest.mark.parametrize(("width", "num_groups"), [(1, 2**20), (0, 2**55)])
def test_a_run_longer_than_its_page_takes_no_memory(width: int, num_groups: int) -> None:
    content = bytes([width]) + varint(num_groups << 1 | 1) + bytes(width * num_groups)
    dictionary = parquet_pages.Values(b"", np.zeros((1, 2), np.int64))
    body = pa.Codec("zstd").compress(content, asbytes=True)
    data = page_header(len(content), len(body), 5, encoding=8) + body
    assert len(data) < 2000
    decoded = most_memory(lambda: parquet_pages.decode_page(data, "zstd", 0, dictionary))
    assert decoded < 3 * len(content) + 2**18


def test_the_values_of_a_page_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(4 * 50_000)  # empty values
    data = page_header(len(content), len(content), 50_000, kind=7) + content
    decoded = most_memory(lambda: parquet_pages.decode_dictionary(data, "uncompressed"))
    assert decoded < len(content) + 17 * 50_000
    monkeypatch.setattr(parquet_pages, "MAX_PAGE_VALUES", 49_999)
    with pytest.raises(ValueError, match="a page has 50000 values, and the limit is 49999"):
        parquet_pages.decode_dictionary(data, "uncompressed")


def test_rows_without_bytes_are_limited(tmp_path: Path) -> None:
    count = 1_000_001
    for columns in ({}, {"text": pa.nulls(count, pa.string())}):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"image": pa.nulls(count, pa.binary()), **columns}), path)
        assert path.stat().st_size < 5000
        with path.open("rb") as file:
            table = ParquetFile(file, "a.parquet")
            with pytest.raises(UserError, match="^a.parquet has a column of 1000001 values in .* the limit is 1000000"):
                next(table.value_places("image"))
        with pytest.raises(UserError, match="1000001 values" if columns else "no column captions or caption or text"):
            locations(path)


@pytest.mark.parametrize(
    "item",
    [b"\x00", b"\x16\x00\x00"],
    ids=["empty structs", "structs of a number"],
)
def test_lists_in_headers_and_footers_take_no_memory(item: bytes) -> None:
    count = 2**14
    structs = b"\xfc" + varint(count) + count * item
    for field in (1, 2, 4, 5):
        footer = bytes([field << 4 | 9]) + structs + b"\x00"
        file = io.BytesIO(footer + len(footer).to_bytes(4, "little") + b"PAR1")

        def read(file: io.BytesIO = file) -> None:
            with contextlib.suppress(ValueError):
                read_row_groups(file, 1)

        assert most_memory(read) < 2 * len(footer) + 2**15


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "data_page_version": "2.0"}, {"compression": "none"}]
)
def test_damaged_pages_end_in_an_error_of_the_image(tmp_path: Path, options: dict[str, Any]) -> None:
    random_, data, path = random.Random(2), written(**options), tmp_path / "a.parquet"
    path.write_bytes(data)
    images, num_failed = locations(path), 0
    expected = [image.read_bytes() for image in images]
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random_.randrange(4, end)] = random_.randrange(256)
        path.write_bytes(damaged)
        forget_pages()
        for image, content in zip(images[::7], expected[::7], strict=True):
            try:
                assert len(image.read_bytes()) <= 10_000 and content
            except OSError:
                num_failed += 1
    assert num_failed > 10


def test_damaged_files_end_in_a_sentence(tmp_path: Path) -> None:
    random_, data, num_refused = random.Random(3), written(), 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[random_.randrange(len(data))] = random_.randrange(256)
        try:
            table = ParquetFile(io.BytesIO(damaged), "a.parquet")
            column = table.binary_column("image")
            if column is not None:
                assert len(list(table.value_places(column.values))) <= 30
                list(table.rows(["text"]))
        except UserError as error:
            assert str(error).startswith("a.parquet ")
            num_refused += 1
    assert num_refused > 10


def test_a_location_that_does_not_fit_its_file_is_an_error_of_the_image(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written())
    image, *_ = locations(path)
    assert image.part is not None
    for changes in ({"row": 99}, {"start": 0}, {"start": 10**12}, {"length": 10**12}, {"length": 3}, {"codec": "zstd"}):
        wrong = ImageLocation(StoragePath(str(path)), image.part._replace(**changes), "x")  # type: ignore[union-attr]
        forget_pages()
        with pytest.raises(OSError):
            ImageLocation.parse(wrong.uri).read_bytes(10**6)


@pytest.mark.parametrize("options", [{}, {"compression": "lz4"}, {"use_dictionary": False, "compression": "none"}])
def test_the_footer_is_read_as_arrow_reads_it(options: dict[str, Any]) -> None:
    data = written(row_group_size=7, write_page_index=True, **options)
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = read_row_groups(io.BytesIO(data), metadata.num_columns)
    assert [group.num_rows for group in groups] == [7, 7, 7, 7, 2]
    for number, group in enumerate(groups):
        for index, chunk in enumerate(group.columns):
            expected = metadata.row_group(number).column(index)
            assert chunk.codec.removesuffix("_raw") == expected.compression.lower()
            offsets = expected.data_page_offset, expected.dictionary_page_offset or 0
            assert chunk[1:] == (expected.total_compressed_size, *offsets)
