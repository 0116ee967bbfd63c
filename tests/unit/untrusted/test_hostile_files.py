"""Annotation, result, detection and word files from elsewhere that a plain reader would not survive."""

from __future__ import annotations

import csv
import gzip
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import read_word_vectors
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.constraints import read_constraints

DEEP = "[" * 100_000
NESTED = "[" * 700 + "]" * 700  # the parser accepts this, and `repr` may fail at it
KARPATHY = '{"images": [{"filename": "a.png", "split": "train", "cocoid": 1, "sentences": [{"raw": "a cat"}]}]}'
COCO = '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "a cat"}]}'
LINE = '{"image": "a.png", "id": 1, "captions": ["a cat"], "split": "train"}\n'


def annotations(folder: Path, name: str, content: bytes | str, **config: Any) -> tuple[Dataset, list[str]]:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_annotations(DataSection(root=str(folder), annotations=name, **config), folder)


def parquet(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", KARPATHY.replace('"cocoid": 1', '"cocoid": 1e999'), r"images\[0\]: the id inf is neither"),
        ("a.json", COCO.replace('"image_id": 1', '"image_id": 1e999'), r"annotations\[0\]: the id inf is neither"),
        ("a.json", COCO.replace('"image_id": 1', f'"image_id": {"9" * 4000}'), "not in 'images', first"),
        ("a.json", COCO.replace('"a.png"', DEEP), "is not valid JSON.*nested too deeply"),
        ("a.json", COCO.replace('"a.png"', NESTED), r"images\[0\] is malformed"),
        ("a.json", COCO.replace('"a.png"', '"' + "../" * 9_000 + '"'), "is outside of"),
        ("a.jsonl", LINE.replace('"id": 1', '"id": 1e999'), "row 1: the id inf is neither"),
        ("a.jsonl", LINE.replace('"id": 1', '"id": ' + NESTED), "row 1: the id .* is neither"),
        ("a.jsonl", LINE.replace('"train"', NESTED), "row 1: split .* is not text"),
        ("a.jsonl", LINE.replace('"train"', "NaN"), "row 1: split nan is not text"),
        ("a.jsonl", LINE + DEEP, "line 2 is not valid JSON.*nested too deeply"),
        ("a.jsonl", '{"x": "\\ud800"}', "no text in the column image"),
        ("a.csv", 'image,captions,id\n"a,b,' + ",a" * 200_000, "as a table: line 2 has 200003 values"),
        ("a.csv", ",".join(map(str, range(2000))) + "\n1\n", "more than 1000 columns"),
        ("a.parquet", parquet(image=["a.png"], id=[float("inf")]), "row 1: the id inf is neither"),
        ("a.parquet", b"PAR1" + bytes(200), "is not a readable Parquet file"),
        ("a.csv.gz", gzip.compress(b"a,b\n", mtime=0)[:-4], "is not a whole gzip file"),
    ],
)
def test_hostile_annotations_are_named(tmp_path: Path, name: str, content: bytes | str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"(^|^annotation file ){tmp_path}/{name}.*{reason}") as caught:
        annotations(tmp_path, name, content)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_captions_that_are_not_text_are_reported_with_their_place(tmp_path: Path) -> None:
    """One bad caption does not hide the others from `raycap check`."""
    sentences = '"sentences": [{"raw": "\\ud800"}, {"raw": NaN}, {"raw": "a cat"}, {"raw": ' + NESTED + "}]"
    dataset, problems, _ = annotations(
        tmp_path, "a.json", KARPATHY.replace('"sentences": [{"raw": "a cat"}]', sentences)
    )
    assert dataset.column("captions") == [["a cat"]]
    assert [problem.split("a caption is ")[1] for problem in problems] == [
        "not text in any encoding",
        "not text but float",
        "not text but list",
    ]
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["image", "captions"], ["a.png", "[" * 100_000], ["b.png", '["a cat"]']])
    dataset, problems, _ = annotations(tmp_path, "a.csv", buffer.getvalue())
    assert dataset.column("captions")[1] == ["a cat"]
    assert len(problems) == 1 and "a caption has 100000 characters" in problems[0]


def test_a_missing_or_special_file_is_no_damaged_file(tmp_path: Path) -> None:
    config = DataSection(root=str(tmp_path), annotations="a.json")
    with pytest.raises(UserError, match=rf"^annotation file {tmp_path}/a.json does not exist"):
        read_annotations(config, tmp_path)
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(UserError, match=rf"^annotation file {tmp_path}/a.json cannot be read"):
        read_annotations(config, tmp_path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="larger than"):
        read_annotations(config.model_copy(update={"annotations": "large.json"}), tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1 " + b"9" * 5_000 + b"\ncat 1 2 3\n", "has vectors of 1 numbers"),
        (b"1 " + b"9" * 17 + b"\ncat 1 2 3\n", "has vectors of 9+ numbers"),
        ("² ²\ncat 1 2 3\n".encode(), "has vectors of 1 numbers"),
        (b"cat nan inf 1e999\n", "of which 0 are finite"),
        (b"cat 1e39 1 1\n", "of which 2 are finite"),
        (b"cat 1 2 " + b"\x1b" * 5_000 + b"\n", "holds a text that is no number"),
        (b"cat 1 2 3" + b" " * 2**20, "line 1 has 1048576 bytes or more"),
        (b"\0" * 3_000_000, "line 1 has 1048576 bytes or more"),
    ],
)
def test_hostile_word_vectors_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "glove.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^model.word_vectors {path}.*{reason}") as caught:
        read_word_vectors(path, ["cat"], 3)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_no_reader_waits_for_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    readers = (read_constraints, lambda path: read_word_vectors(path, ["cat"], 3))
    for read in readers:
        with pytest.raises(UserError, match="not a regular file"):
            read(pipe)
    with suppress(UserError), pytest.raises(OSError, match="not a regular file"):
        Vocabulary.load(pipe)
