"""Mutated files of every form give a result or a UserError, never another exception."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.caption_files import read_predictions, read_references
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.data.word_vectors import read_word_vectors
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.constraints import (
    choose_constraints,
    read_constraints,
    read_detections,
    read_hierarchy,
)
from raycap.pipeline.evaluation.scores.metrics import score_captions

NUM_MUTANTS = 60  # of each form
Reader = Callable[[Path], Any]

KARPATHY = {
    "images": [
        {"filepath": "f", "filename": f"{k}.png", "cocoid": k, "split": "val", "sentences": [{"raw": "a cat"}] * 2}
        for k in range(2)
    ]
}
COCO = {
    "images": [{"id": 1, "file_name": "1.png", "domain": "near"}, {"id": 2, "file_name": "2.png"}],
    "annotations": [{"image_id": 1, "caption": "a cat"}, {"image_id": 2, "caption": "a dog"}],
}
ROWS = [
    {"image": "1.png", "id": 1, "captions": ["a cat", "cats"], "split": "train"},
    {"image": "2.png", "id": 2, "captions": ["a dog"], "split": "val"},
]
RESULTS = [{"image_id": 1, "caption": "a cat"}, {"image_id": 2, "caption": "a dog"}]
BOXES = {
    "categories": [{"id": 4, "name": "dog"}, {"id": 5, "name": "animal"}],
    "annotations": [
        {"image_id": 1, "category_id": kind, "score": 0.5, "bbox": [0, 0, 4, 6.5]} for kind in (4, 5, 4, 5)
    ],
}
BOX_ROWS = [{"image_id": 1, "label": name, "score": 0.5, "box": [0, 0, 4, 6]} for name in ("dog", "animal")]
TREE = {"LabelName": "animal", "Subcategory": [{"LabelName": "dog"}, {"LabelName": "cat", "Subcategory": []}]}
CONSTRAINTS = [
    {"image_id": 1, "constraints": ["horse", ["cart", "red wagon"]], "at_least": 1},
    {"image_id": 2, "constraints": []},
]
VOCABULARY = {"tokenizer": "spacy", "words": ["PAD", "SOS", "EOS", "UNK", "cat"]}
GLOVE = b"3 2\ncat 0.5 -1\ndog 1e-3 2\n"
CSV = b'image,id,captions,split\n1.png,1,"[""a cat"", ""cats""]",train\n2.png,2,a dog,val\n'


def read_annotation_file(path: Path) -> None:
    read_annotations(DataSection(root=str(path.parent), annotations=path.name), path.parent)


def read_and_score(path: Path) -> None:
    references: dict[Any, list[str]] = {1: ["a cat"], 2: ["a dog", "a"]}
    score_captions(references, read_predictions(path), metrics=("BLEU-4", "CIDEr-D"))


def read_and_choose(path: Path) -> None:
    for boxes in read_detections(path).values():
        choose_constraints(boxes, {"animal": 1, "dog": 0})


def document(value: Any) -> bytes:
    return json.dumps(value).replace("Infinity", "1e999").encode()


def lines(value: Any) -> bytes:
    return b"\n".join(map(document, value if isinstance(value, list) else [value]))


def table(value: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(value), buffer)
    return buffer.getvalue()


STRUCTURES: dict[str, tuple[Any, Callable[[Any], bytes], Reader]] = {
    "karpathy.json": (KARPATHY, document, read_annotation_file),
    "karpathy.json.gz": (KARPATHY, lambda value: gzip.compress(document(value), mtime=0), read_annotation_file),
    "coco.json": (COCO, document, read_annotation_file),
    "rows.jsonl": (ROWS, lines, read_annotation_file),
    "references.json": (COCO, document, read_references),
    "karpathy_references.json": (KARPATHY, document, lambda path: read_references(path, "val")),
    "results.json": (RESULTS, document, read_and_score),
    "boxes.json": (BOXES, document, read_and_choose),
    "boxes.jsonl": (BOX_ROWS, lines, read_and_choose),
    "tree.json": (TREE, document, read_hierarchy),
    "constraints.jsonl": (CONSTRAINTS, lines, read_constraints),
    "vocabulary.json": (VOCABULARY, document, Vocabulary.load),
}
BYTES: dict[str, tuple[bytes, Reader]] = {
    name: (write(value), read) for name, (value, write, read) in STRUCTURES.items()
}
BYTES |= {
    "rows.csv": (CSV, read_annotation_file),
    "rows.parquet": (table(ROWS), read_annotation_file),
    "glove.txt": (GLOVE, lambda path: read_word_vectors(path, ["cat", "dog"], 2)),
}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


STRANGE = (
    [], {}, None, True, -1, 0, 10**30, -(10**400), 1e308, 1e-308, float("inf"), float("-inf"), float("nan"), "", "\0",
    "\ud800", "\x1b[2J\n", "9" * 5_000, "x" * 20_000, "../..", "s3://b/c", [None], {"id": []}, nested(600),
)  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def with_strange_value(value: Any, rng: random.Random) -> Any:
    """A copy in which one value, or one key, is replaced."""
    copy = json.loads(json.dumps(value))
    *parents, last = rng.choice(list(places(value))[1:])
    node = copy
    for key in parents:
        node = node[key]
    if isinstance(node, dict) and rng.random() < 0.2:
        node["renamed"] = node.pop(last)
    else:
        node[last] = rng.choice(STRANGE)
    return copy


def with_strange_bytes(data: bytes, rng: random.Random) -> bytes:
    """A copy with bytes flipped, cut out or repeated."""
    start, length = rng.randrange(len(data)), rng.randrange(1, 20)
    kind = rng.randrange(4)
    if kind == 0:
        return data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
    if kind == 1:
        return data[:start] + data[start + length :]
    if kind == 2:
        return data[: start + length] * rng.randrange(1, 3) + data[start:]
    return data[:start] + rng.randbytes(length) + data[start + length :]


def read_mutant(path: Path, content: bytes, read: Reader) -> None:
    path.write_bytes(content)
    try:
        read(path)
    except UserError as error:
        assert len(str(error)) < 2_000
    except ValueError as error:
        assert path.name == "vocabulary.json", f"{type(error).__name__}: {error}"  # whoever reads it adds the place


@pytest.mark.parametrize("name", STRUCTURES)
def test_strange_values_give_a_result_or_a_sentence(name: str, tmp_path: Path) -> None:
    value, write, read = STRUCTURES[name]
    (tmp_path / name).write_bytes(write(value))
    read(tmp_path / name)  # the file itself is read
    rng = random.Random(zlib.crc32(name.encode()))
    for _ in range(NUM_MUTANTS):
        read_mutant(tmp_path / name, write(with_strange_value(value, rng)), read)


@pytest.mark.parametrize("name", BYTES)
def test_strange_bytes_give_a_result_or_a_sentence(name: str, tmp_path: Path) -> None:
    content, read = BYTES[name]
    rng = random.Random(zlib.crc32(name.encode()) + 1)
    for _ in range(NUM_MUTANTS):
        read_mutant(tmp_path / name, with_strange_bytes(content, rng), read)
