"""Hostile Parquet files with images are refused in a sentence, by a process with a limit of memory."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.images import ImageLocation, forget_row_groups
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted import parquet_files
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile


def written(**options: Any) -> bytes:
    buffer, random_ = io.BytesIO(), random.Random(0)
    rows = [{"image": {"bytes": random_.randbytes(50), "path": f"{n}"}, "text": "a cat"} for n in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def locations(path: Path) -> list[ImageLocation]:
    dataset = read_annotations(DataSection(root=str(path.parent), annotations=path.name), path.parent).dataset
    return list(map(ImageLocation.parse, dataset.column("uri")))


def bomb(path: Path, size: int) -> None:
    """One image of zeros, a file of some kilobytes."""
    table = pa.table({"image": pa.array([bytes(size)], pa.binary()), "text": ["a cat"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def test_a_large_row_group_is_refused_and_its_stated_size_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "MAX_GROUP_BYTES", 2**20)
    path = tmp_path / "a.parquet"
    bomb(path, 2**20 + 1)
    (image,) = locations(path)
    with pytest.raises(OSError, match=r"has \d+ bytes of images; the limit is 1048576; write smaller ones"):
        image.read_bytes()
    stated = pq.ParquetFile(path).metadata.row_group(0)
    data = path.read_bytes()
    sizes = {stated.total_byte_size, stated.column(0).total_uncompressed_size}
    path.write_bytes(with_footer(data, dict.fromkeys(sizes, 100)))
    forget_row_groups()
    (image,) = locations(path)
    with pytest.raises(OSError, match="bytes of images; the limit is 1048576"):
        image.read_bytes()


def test_a_bomb_ends_the_reader_and_not_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand values of 512 kB, which are stored once, need more memory than the reader has."""
    path = tmp_path / "a.parquet"
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000), pa.array([bytes(2**19)]))
    pq.write_table(pa.table({"image": value, "text": ["a cat"] * 20_000}), path, compression="zstd", store_schema=False)
    image, *_ = locations(path)
    with pytest.raises(OSError, match="not readable"):
        image.read_bytes()
    path.write_bytes(written())
    forget_row_groups()
    assert len(locations(path)[0].read_bytes()) == 50, "another reader has started"


def with_footer(data: bytes, changes: dict[int, int]) -> bytes:
    """A Parquet file with other numbers in its footer. They are zigzag varints of the same length.

    changes: {old number: new number}."""
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8]
    for old, new in changes.items():
        digits = [(2 * old) >> 7 * index & 127 for index in range(((2 * old).bit_length() + 6) // 7)]
        stated = [(2 * new) >> 7 * index & 127 for index in range(len(digits))]
        before, after = (bytes([*(d | 128 for d in each[:-1]), each[-1]]) for each in (digits, stated))
        assert before in footer
        footer = footer.replace(before, after)
    return data[:start] + footer + data[-8:]


def test_a_footer_of_many_columns_is_limited_by_the_size_of_the_file() -> None:
    """In memory, an empty column takes 200 times the bytes of the file."""
    groups = 3 * (b"\x19\xfc\xa0\xf7\x36" + 900_000 * b"\x26\0\0" + b"\x16\0\x16\0\0")
    schema = b"\x48\x01r\x15\x02\0" + b"\x15\x0c\x25\0\x18\x05image\0"
    footer = b"\x15\x02\x19\x2c" + schema + b"\x16\0\x19\x3c" + groups + b"\0"
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(UserError, match=r"^f is not a readable Parquet file: .*bad_alloc"):
        ParquetFile(io.BytesIO(data), "f")


def test_rows_of_nothing_and_text_that_repeats_are_limited(tmp_path: Path) -> None:
    count = 1_000_001
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": pa.nulls(count, pa.binary()), "text": pa.nulls(count, pa.string())}), path)
    assert path.stat().st_size < 5000
    with pytest.raises(UserError, match=f"it has {count} rows in .* the limit is 1000000"):
        locations(path)
    big = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["x" * 2**16]))
    nested = pa.ListArray.from_arrays(pa.array([0, 20_000], pa.int32()), big)
    flags = pa.StructArray.from_arrays([pa.array(np.zeros(2**20, bool))], ["a"])
    empty = pa.ListArray.from_arrays(pa.array(np.zeros(2**20 + 1, np.int32)), pa.array([], pa.string()))
    lists = [
        pa.ListArray.from_arrays(pa.array([0, len(each)], pa.int32()), each) for each in (nested.values, flags, empty)
    ]
    for columns in ({"image": big}, *({"image": ["a.png"], "captions": each} for each in lists)):
        pq.write_table(pa.table(columns), path)
        assert path.stat().st_size < 10**5
        with pytest.raises(UserError, match=r"its values take more than \d+ bytes"):
            locations(path)


def test_a_location_that_does_not_fit_its_file_is_an_error_of_the_image(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written())
    image, *_ = locations(path)
    assert image.part is not None
    for changes in ({"row": 99}, {"group": 7}, {"leaf": 9}):
        wrong = ImageLocation(StoragePath(str(path)), image.part._replace(**changes), "x")  # type: ignore[union-attr]
        with pytest.raises(OSError):
            ImageLocation.parse(wrong.uri).read_bytes(10**6)
    path.write_bytes(path.read_bytes()[:-4])
    forget_row_groups()
    with pytest.raises(OSError, match="not a readable Parquet file"):
        image.read_bytes()
