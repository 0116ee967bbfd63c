"""The stored captions of a teacher: chunks are whole or computed again, and images are found in any of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.load import parse_config
from pipeline.data.dataset import SCHEMA, Dataset
from pipeline.distillation.caption_store import MAX_CAPTION, CaptionStore, images_to_caption
from pipeline.errors import DamagedError
from pipeline.storage.path import storage_path
from tests.conftest import small_config


@pytest.fixture
def store(tmp_path: Path) -> CaptionStore:
    return CaptionStore(storage_path(tmp_path / "distilled"))


def keys_of(*numbers: int) -> pa.ChunkedArray:
    return pa.chunked_array([[f"key{number}" for number in numbers]], pa.string())


def write(store: CaptionStore, *numbers: int) -> None:
    keys = [f"key{number}" for number in numbers]
    store.write(keys, {key: [f"caption of {key}", None] for key in keys})


def test_images_are_found_in_any_chunk(store: CaptionStore) -> None:
    assert store.lacks(keys_of(1, 2, 3)).all() and not store.chunks()
    write(store, 1, 2)
    write(store, 5)
    assert store.lacks(keys_of(5, 3, 1, 4)).tolist() == [False, True, False, True]
    rows = {row["key"]: row["captions"] for table in store.read() for row in table.to_pylist()}
    assert rows == {f"key{number}": [f"caption of key{number}", None] for number in (1, 2, 5)}
    assert store.has(["key1", "key2"]) and not store.has(["key1"]) and not store.has(["key2", "key1"])


def test_the_same_images_are_the_same_chunk(store: CaptionStore) -> None:
    write(store, 1, 2)
    write(store, 1, 2)
    assert len(store.chunks()) == 1


def test_a_damaged_chunk_is_computed_again_and_a_whole_one_is_not(store: CaptionStore) -> None:
    write(store, 1, 2)
    (damaged,) = store.chunks()
    write(store, 3)
    path = (store.folder / damaged).path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=damaged):
        list(store.read())
    assert store.lacks(keys_of(1, 2, 3)).tolist() == [True, True, False]
    assert damaged not in store.chunks() and len(store.chunks()) == 1
    (store.folder / f".{damaged}.1234.tmp").write_bytes(b"a killed writer")
    assert len(store.chunks()) == 1


def test_unreadable_images_remain_missing(store: CaptionStore) -> None:
    store.write(["key1", "key2"], {"key2": ["a caption"]})
    assert store.lacks(keys_of(1, 2)).tolist() == [True, False]
    store.write(["key1"], {})
    assert len(store.chunks()) == 1 and not store.has(["key1"])


def test_a_caption_of_any_length_takes_bounded_space(store: CaptionStore) -> None:
    store.write(["key1"], {"key1": ["a" * MAX_CAPTION, "a" * (MAX_CAPTION + 1)]})
    (table,) = store.read()
    assert table["captions"].to_pylist() == [["a" * MAX_CAPTION, None]]


def test_each_training_image_is_captioned_once(tmp_path: Path) -> None:
    config = parse_config(small_config(tmp_path, data__train_splits=["train", "restval"]))
    generator = np.random.default_rng(0)
    splits = generator.choice(["train", "restval", "val", "test"], 200).tolist()
    keys = [None if number == 13 else f"key{number}" for number in generator.integers(0, 60, 200).tolist()]
    columns = [range(200), splits, [f"{number}.png" for number in range(200)], [["a"]] * 200, keys]
    images = images_to_caption(config, Dataset(pa.table(columns, schema=SCHEMA)))
    expected = {key for key, split in zip(keys, splits, strict=True) if key and split in ("train", "restval")}
    assert sorted(images.column("key")) == sorted(expected)
    for image, uri, key in zip(*map(images.column, ("image_id", "uri", "key")), strict=True):
        assert keys[image] == key and uri == f"{image}.png"
