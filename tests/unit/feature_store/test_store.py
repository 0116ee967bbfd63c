"""The feature store: partial writes are never read, and damage is found."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.features.extraction import plan_extraction
from raycap.pipeline.features.store import (
    FeatureStore,
    feature_key,
    has_shard,
    remove_orphans,
    shard_name,
    write_quarantine,
    write_shard,
)
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.damage import cut, empty, flip_any
from tests.support.features import contains, gather, positions


def test_rows_follow_the_order_of_the_request(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10, 3, 4)).astype(np.float16)
    keys = [f"k{number}" for number in range(10)]
    write_shard(tmp_path, keys[:6], rows[:6])
    write_shard(tmp_path, keys[6:], rows[6:])
    store = FeatureStore(tmp_path)
    order = rng.permutation(10)
    assert np.array_equal(gather(store, [keys[row] for row in order]), rows[order])
    assert len(store) == 10 and contains(store, "k3") and not contains(store, "other")
    with pytest.raises(DamagedError, match="other"):
        gather(store, ["other"])


def test_a_shard_without_its_manifest_does_not_exist(tmp_path: Path) -> None:
    write_shard(tmp_path, ["a"], np.ones((1, 2, 2), np.float16))
    write_shard(tmp_path, ["b"], np.ones((1, 2, 2), np.float16))
    killed = next(tmp_path.glob("manifest/*.parquet"))
    killed.unlink()
    (tmp_path / "shards" / "half.tmp").write_bytes(b"half")
    assert len(FeatureStore(tmp_path)) == 1
    remove_orphans(storage_path(tmp_path))
    assert len(list(tmp_path.glob("shards/*"))) == 3, "young files may belong to a running writer"
    remove_orphans(storage_path(tmp_path), min_age_s=-1)
    assert len(FeatureStore(tmp_path)) == 1 and len(list(tmp_path.glob("shards/*"))) == 1


def test_the_feature_key_changes_with_the_description() -> None:
    base = {"backbone": {"name": "swin"}, "weights": "abc", "compute": "float32"}
    assert feature_key(base) == feature_key(dict(reversed(base.items())))
    assert len({feature_key(base | change) for change in ({}, {"weights": "abd"}, {"compute": "bfloat16"})}) == 3


def filled(folder: Path, shards: int = 3, rows: int = 4) -> tuple[list[str], np.ndarray]:
    features = np.random.default_rng(1).normal(size=(shards * rows, 3, 4)).astype(np.float16)
    keys = [f"k{number}" for number in range(len(features))]
    for start in range(0, len(keys), rows):
        write_shard(folder, keys[start : start + rows], features[start : start + rows])
    return keys, features


def test_a_task_done_twice_writes_the_same_shard(tmp_path: Path) -> None:
    keys, features = filled(tmp_path)
    assert has_shard(tmp_path, keys[:4]) and not has_shard(tmp_path, keys[:3])
    filled(tmp_path)
    store = FeatureStore(tmp_path)
    assert len(store.shards) == 3 and len(store.keys) == len(store) == 12
    write_shard(tmp_path, keys[2:6], features[2:6])  # another extraction has other shard boundaries
    store = FeatureStore(tmp_path)
    assert len(store.keys) == 16 and len(store) == 12 and np.array_equal(gather(store, keys), features)


def content_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def plain_plan(keys: list[str | None], stored: set[str], bad: dict[str, str]) -> tuple[int, list[int], dict[str, str]]:
    """What `plan_extraction` finds."""
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, row)
    missing = [row for key, row in first.items() if key not in stored and key[:64] not in bad]
    return len(first), missing, {key[:64]: bad[key[:64]] for key in first if key[:64] in bad}


@pytest.mark.parametrize("count", [0, 1, 40, 5000])
def test_a_plan_is_that_of_lists(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    keys: list[str | None] = [
        None if dice < 0.1 else content_key(number) + ("-v-1" if dice > 0.8 else "")
        for number, dice in zip(rng.integers(0, max(1, count), count).tolist(), rng.random(count), strict=True)
    ]
    known = [key for key in dict.fromkeys(keys) if key is not None]
    stored, bad = known[::3], {key[:64]: "empty file" for key in known[1::7]}
    if stored:
        write_shard(tmp_path, stored, np.zeros((len(stored), 1, 1), np.float32))
    columns = [range(count), ["train"] * count, [f"{row}.jpg" for row in range(count)], [["a"]] * count, keys]
    dataset = Dataset(
        pa.table([pa.array(each, field.type) for each, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    )
    write_quarantine(storage_path(tmp_path), dataset, bad, {})
    plan = plan_extraction(dataset, StoragePath(str(tmp_path)), 10**6)
    num_images, missing, unusable = plain_plan(keys, set(stored), bad)
    assert (plan.num_images, plan.missing["uri"].to_pylist(), plan.unusable) == (
        num_images,
        [f"{row}.jpg" for row in missing],
        unusable,
    )


def test_an_image_that_was_too_large_is_tried_with_another_limit(tmp_path: Path) -> None:
    place, key = storage_path(tmp_path), content_key(0)
    dataset = Dataset(pa.table([[0], ["train"], ["0.jpg"], [["a"]], [key]], schema=SCHEMA))
    write_quarantine(place, dataset, {key: "200 x 200 pixels, more than 20000"}, {})
    assert plan_extraction(dataset, place, 20_000).unusable.keys() == {key}
    assert len(plan_extraction(dataset, place, 50_000).missing) == 1


def test_verify_reads_everything_back(tmp_path: Path) -> None:
    filled(tmp_path)
    assert FeatureStore(tmp_path).verify() == []
    first, second, third = sorted((tmp_path / "shards").iterdir())
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.unlink()
    third.write_bytes(third.read_bytes()[:-8])
    sentences = FeatureStore(tmp_path).verify()
    assert len(sentences) == 3 and sum("does not have the digest" in sentence for sentence in sentences) == 2
    assert sum("is missing" in sentence for sentence in sentences) == 1


def test_regions_keep_lengths_and_boxes(tmp_path: Path) -> None:
    features = np.zeros((2, 5, 3), np.float32)
    boxes = np.random.default_rng(0).random((5, 4)).astype(np.float32)
    write_shard(tmp_path, ["a", "b"], features, lengths=[3, 5], boxes=[boxes[:3], None])
    write_shard(tmp_path, ["c"], features[:1], lengths=[5], boxes=[boxes])
    store = FeatureStore(tmp_path)
    stored_lengths, stored_boxes = store.regions_at(positions(store, ["c", "b", "a"]))
    assert stored_lengths is not None and stored_lengths.tolist() == [5, 5, 3]
    assert stored_boxes is not None and np.array_equal(stored_boxes[0], boxes) and not stored_boxes[1].any()
    assert np.array_equal(stored_boxes[2, :3], boxes[:3]) and not stored_boxes[2, 3:].any()
    keys, grids = filled(tmp_path / "grids")
    store = FeatureStore(tmp_path / "grids")
    assert store.regions_at(positions(store, keys[:2])) == (None, None)
    assert np.array_equal(gather(store, keys[:2]), grids[:2])


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("size", [None, 8, 140])
def test_a_damaged_shard_that_is_read_in_ranges_is_computed_again(
    s3: str, tmp_path: Path, size: int | None, is_open: bool
) -> None:
    """The cache has no room. size: bytes that are left of the shard, or None if the shard is missing."""
    folder, keys = StoragePath(f"s3://data/{tmp_path.name}", StorageOptions(s3)), ["a", "b"]
    features = np.ones((2, 3, 4), np.float16)
    write_shard(folder, keys, features)
    store, shard = FeatureStore(folder, tmp_path, cache_bytes=0), folder / f"shards/{shard_name(keys)}.npy"
    if is_open:
        assert np.array_equal(gather(store, keys), features)
    content = shard.read_bytes()[:size]
    shard.delete() if size is None else shard.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{shard_name(keys)}.*; the same command computes its features again$"):
        gather(store, keys)
    assert not has_shard(folder, keys)


@pytest.mark.parametrize("damage", [cut, empty, flip_any, Path.unlink])
def test_a_damaged_shard_is_named_and_computed_again(tmp_path: Path, damage: Any) -> None:
    keys, features = filled(tmp_path)
    assert np.array_equal(gather(FeatureStore(tmp_path), keys), features)
    path, store = sorted((tmp_path / "shards").iterdir())[0], FeatureStore(tmp_path)
    damage(path)
    with pytest.raises(DamagedError, match=f"^{path} .*; the same command computes its features again$"):
        gather(store, keys)
    assert len(FeatureStore(tmp_path)) == 8 and not has_shard(tmp_path, keys)
    filled(tmp_path)
    assert np.array_equal(gather(FeatureStore(tmp_path), keys), features)
