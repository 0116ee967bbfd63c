"""Data sets, vocabularies and content keys: what is read, what is refused, and that no file is read twice."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.content_keys import take_snapshot
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.language.tokenizers import tokenize
from raycap.pipeline.data.reading import build_vocabulary, longest_caption, read_dataset
from raycap.pipeline.data.vocabulary import SPECIALS, Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError
from raycap.pipeline.training.batches import CaptionTokens
from tests.conftest import write_karpathy
from tests.support.buckets import Bucket


def section(root: Path, **values: Any) -> DataSection:
    return DataSection(root=str(root), **values)


def test_tokens_equal_the_published_codes(shared: Path) -> None:
    for entry in json.loads((shared / "golden" / "caption_tokens.json").read_text()):
        assert tokenize(entry["raw"]) == entry["tokens"]


def test_karpathy_is_read_with_restval_as_training(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 3, "restval": 2, "val": 2, "test": 1})
    dataset = read_dataset(section(root), root)
    assert len(dataset.split("train", "restval")) == 5
    assert dataset.column("image_id")[:2] == [100, 101]
    dataset.save(tmp_path / "data.arrow")
    assert Dataset.load(tmp_path / "data.arrow").table.equals(dataset.table)
    assert longest_caption(dataset, Vocabulary(SPECIALS)) == 9  # seven words, SOS and EOS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["images"][0].update(filename="../../etc/passwd"), "outside"),
        (lambda data: data["images"][0].update(filepath="/etc"), "outside"),
        (lambda data: data["images"][0].pop("sentences"), r"images\[0\] has no 'sentences'"),
        (lambda data: data["images"][1].update(cocoid=100), "repeats the image id 100"),
        (lambda data: data["images"][0].update(sentences=[{"raw": " . "}]), "no caption with a word"),
        (lambda data: data["images"][0].update(sentences=[{"raw": "\ud800"}]), r"images\[0\] is malformed"),
        (lambda data: data["images"][0].update(filename="a\0b"), r"images\[0\] is malformed"),
        (lambda data: data.update(images=[]), "not empty"),
    ],
)
def test_malformed_annotations_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 2, "val": 1, "test": 1})
    data = json.loads((root / "dataset.json").read_text())
    change(data)
    (root / "dataset.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        read_dataset(section(root), root)


def tokenized_set(folder: Path, tokens: dict[str, Any]) -> Path:
    """A data set of one image per split; the captions have these tokens by split."""
    root = write_karpathy(folder, dict.fromkeys(tokens, 1))
    data = json.loads((root / "dataset.json").read_text())
    for entry in data["images"]:
        for number, sentence in enumerate(entry["sentences"]):
            sentence |= {"tokens": tokens[entry["split"]][number]} if tokens[entry["split"]] else {}
    (root / "dataset.json").write_text(json.dumps(data))
    return root


def test_the_tokens_of_the_file_are_the_words(tmp_path: Path) -> None:
    """The model learns the file's tokens, and references stay raw captions. A caption without tokens is left out."""
    words = {split: [[split, "t-shirt", "A"], ["a"], ["a"], ["a"], []] for split in ("train", "val", "test")}
    root = tokenized_set(tmp_path / "set", words)
    config = section(root, tokenizer="tokens", min_count=1, vocabulary_splits=("train", "test"))
    dataset = read_dataset(config, root)
    assert list(dataset.tokens("tokens"))[:4] == [["train", "t-shirt", "A"], ["a"], ["a"], ["a"]]
    assert dataset.references()[100] == [f"A picture of color 0 number {number}." for number in range(4)]
    assert list(dataset.texts("tokens"))[:4] == ["train t-shirt A", "a", "a", "a"]
    assert longest_caption(dataset, Vocabulary(SPECIALS, "tokens")) == 5
    vocabulary = build_vocabulary(dataset, config)
    words_of_file = {"train", "test", "t-shirt", "A", "a", "EOS", "PAD", "SOS", "UNK"}
    assert vocabulary.words == tuple(sorted(words_of_file))
    (tmp_path / "classes.txt").write_text("Harbor seal\n")
    classes = config.model_copy(update={"extra_vocabulary": str(tmp_path / "classes.txt")})
    assert set(build_vocabulary(dataset, classes).words) == words_of_file | {"harbor", "seal"}
    captions = CaptionTokens.of(dataset.split("train"), vocabulary)
    assert captions.padded(np.array([0])).tolist() == [vocabulary.encode(["train", "t-shirt", "A"])]
    dataset.save(tmp_path / "data.arrow")
    assert Dataset.load(tmp_path / "data.arrow").table.equals(dataset.table)
    plain = read_dataset(section(root), root)
    assert plain.table.column_names == SCHEMA.names and len(plain.references()[100]) == 5
    rows = plain.table.select(["image_id", "split", "key", "captions"]).to_pylist()
    assert plain.fingerprint() == hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()
    words["train"][0][0] = "other"
    other = read_dataset(config, tokenized_set(tmp_path / "other", words))
    assert other.references() == dataset.references() and other.fingerprint() != dataset.fingerprint()
    for wrong, problem in ((["a b"], "not a list of words"), (["a"] * 5001, "have 10001 characters; the limit is 10")):
        words["train"][0] = wrong
        with pytest.raises(UserError, match=problem):
            read_dataset(config, tokenized_set(tmp_path / str(len(wrong)), words))


def test_missing_folders_and_empty_splits_are_named(tmp_path: Path) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 2, "val": 1})
    with pytest.raises(UserError, match=r"data.test_splits \(test\).*splits train, val"):
        read_dataset(section(root), root)
    with pytest.raises(UserError, match="data.images"):
        read_dataset(section(root, images="nowhere"), root)
    with pytest.raises(UserError, match="data.root"):
        read_dataset(section(tmp_path / "nowhere"), tmp_path / "nowhere")


def test_vocabulary_is_sorted_with_its_specials(tmp_path: Path) -> None:
    vocabulary = Vocabulary.build([["b", "a"], ["b", "TV"]], min_count=1)
    assert vocabulary.words == ("EOS", "PAD", "SOS", "TV", "UNK", "a", "b")
    assert vocabulary.decode(vocabulary.encode(["a", "zebra"])) == "a UNK"
    vocabulary.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json") == vocabulary
    root = write_karpathy(tmp_path / "set", {"train": 2, "val": 1, "test": 1})
    with pytest.raises(UserError, match=r"vocabulary is empty.*data.min_count = 99"):
        build_vocabulary(read_dataset(section(root), root), section(root, min_count=99))


def test_an_outage_does_not_take_images_out_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage and missing rights end the command. An archived object is taken out."""
    bucket = Bucket(["x.png", "y.png"])
    bucket.install(monkeypatch)
    columns = [range(2), ["train"] * 2, [*bucket.objects], [["a"]] * 2, pa.nulls(2, pa.string())]
    dataset = Dataset(pa.table(columns, schema=SCHEMA))

    def fail_with(error: OSError) -> None:
        def read(path: StoragePath) -> bytes:
            if path.uri.endswith("y.png"):
                raise error
            return b"x"

        monkeypatch.setattr("raycap.pipeline.data.content_keys.read_image_file", read)

    fail_with(StorageError("s3://bucket/y.png: storage failed"))
    with pytest.raises(StorageError, match=r"y.png: storage failed"):
        take_snapshot(dataset, tmp_path / "manifest.parquet")
    assert not (tmp_path / "manifest.parquet").exists()
    fail_with(PermissionError(errno.EACCES, "the object is archived"))
    found, unreadable = take_snapshot(dataset, tmp_path / "manifest.parquet")
    assert list(unreadable) == ["s3://bucket/y.png"] and found.table["key"].null_count == 1


def test_the_fingerprint_depends_on_content_not_on_location(tmp_path: Path) -> None:
    prints = []
    for name in ("here", "there"):
        root = write_karpathy(tmp_path / name, {"train": 2, "val": 1, "test": 1})
        prints.append(take_snapshot(read_dataset(section(root), root), tmp_path / f"{name}.parquet")[0].fingerprint())
    assert prints[0] == prints[1]
