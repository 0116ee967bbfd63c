"""The stored captions of a teacher: chunks are whole or computed again, and images are found in any of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.runs.distillation.caption_store import MAX_CAPTION, CaptionStore, images_to_caption
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import make_bundle
from tests.support.distillation import region_values, stored_captions


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
    assert store.stored(["key1", "key2"]) == {"key1", "key2"}
    assert not store.stored(["key1"]) and not store.stored(["key2", "key1"])


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
    path.write_bytes(data)
    assert not store.stored(["key1", "key2"]), "a repeated task computes it again"


def test_unreadable_images_remain_missing(store: CaptionStore) -> None:
    store.write(["key1", "key2"], {"key2": ["a caption"]})
    assert store.lacks(keys_of(1, 2)).tolist() == [True, False]
    store.write(["key1"], {})
    assert len(store.chunks()) == 1 and not store.stored(["key1"]) and store.stored(["key1", "key2"]) == {"key2"}


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


def dataset_of(keys: Sequence[str]) -> Dataset:
    columns = [range(len(keys)), ["train"] * len(keys), [f"{key}.png" for key in keys], [["a"]] * len(keys), keys]
    return Dataset(pa.table(columns, schema=SCHEMA))


def chunks_to_caption(images: Dataset, stored: Set[str], without: Set[str], size: int) -> list[list[str]]:
    """The keys of each chunk of the images that are neither stored nor `without` features, for two workers."""
    keys = images.column("key")
    is_stored = np.array([key in stored for key in keys], bool)
    is_wanted = ~is_stored & np.array([key not in without for key in keys], bool)
    chunks = CaptionStore(storage_path("/nowhere"), size).divide(images, is_stored, is_wanted)
    workers = [chunks.of_worker(rank, 2) for rank in (0, 1)]
    every = [part for pair in itertools.zip_longest(*workers) for part in pair if part is not None]
    return [Dataset(chunks.images.table[rows]).column("key") for rows in every]


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_command_has_the_chunks_of_an_undisturbed_one(seed: int) -> None:
    """Unreadable images of finished chunks are tried again, and move no image of the others to another chunk."""
    generator = np.random.default_rng(seed)
    size, count = int(generator.integers(2, 9)), int(generator.integers(1, 60))
    keys = [f"key{number}" for number in range(count)]
    images, share = dataset_of(keys), float(generator.choice([0.0, 0.1, 0.4]))
    unreadable, without = ({key for key in keys if generator.random() < share} for _ in range(2))
    undisturbed = chunks_to_caption(images, set(), without, size)
    assert [key for chunk in undisturbed for key in chunk] == [key for key in keys if key not in without]
    assert max(map(len, undisturbed), default=0) <= size
    done = [chunk for chunk in undisturbed if generator.random() < 0.5]
    stored = {key for chunk in done for key in chunk} - unreadable
    resumed = chunks_to_caption(images, stored, without, size)
    finished = [chunk for chunk in done if not unreadable.issuperset(chunk)]
    assert [chunk for chunk in undisturbed if chunk not in finished] == resumed[: len(undisturbed) - len(finished)]
    again = [key for chunk in resumed[len(undisturbed) - len(finished) :] for key in chunk]
    assert again == [key for chunk in finished for key in chunk if key in unreadable]


def test_new_images_between_old_ones_fill_chunks() -> None:
    keys = [f"key{number}" for number in range(100)]
    new = set(keys[5:80:10]) | set(keys[90:])
    chunks = chunks_to_caption(dataset_of(keys), set(keys) - new, set(), 10)
    assert chunks == [keys[90:], keys[5:80:10]]


def test_regions_of_other_files_and_settings_have_other_captions(tmp_path: Path) -> None:
    """Their content keys are image ids, which are the same in every file."""

    def folder(**changes: Any) -> str:
        values = region_values(tmp_path, tmp_path / "teacher")
        values["features"] |= changes
        return stored_captions(parse_config(values)).folder.name

    make_bundle(tmp_path / "teacher", backbone=False, protocol=Protocol(features="regions"))
    base = folder()
    assert folder() == base and re.fullmatch(r"\w{20}", base)
    for name in ("a", "b"):
        (tmp_path / f"{name}.hdf5").write_bytes(name.encode())
    others = [folder(hdf5=str(tmp_path / f"{name}.hdf5")) for name in ("a", "b")]
    assert len({base, *others, folder(max_regions=3), folder(stored_dtype="float32")}) == 5
