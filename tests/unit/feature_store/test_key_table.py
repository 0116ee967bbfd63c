"""Tables of keys find what a dict finds, and an index in parts has what the manifests have."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.data.dataset import SCHEMA, Dataset, Selection
from raycap.pipeline.features.extraction import plan_extraction
from raycap.pipeline.features.store import index
from raycap.pipeline.features.store.index import KeyTable, ManifestRows, key_digests, read_manifests, write_index
from raycap.pipeline.features.store.store import FeatureStore, remove_damaged, shard_name, write_quarantine, write_shard
from raycap.pipeline.storage.path import StoragePath, storage_path
from tests.support.damage import flip_any
from tests.support.features import gather


def content_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def random_keys(rng: np.random.Generator, count: int) -> list[str]:
    """Content keys, keys of views, of regions and others, some of them several times."""
    forms = [content_key, lambda n: f"{content_key(n)}-0f-{n % 3}", lambda n: f"id-{n}", lambda n: f"{n:064}"]
    numbers, kinds = rng.integers(0, max(1, count), count), rng.integers(0, len(forms), count)
    return [forms[kind](int(number)) for number, kind in zip(numbers, kinds, strict=True)]


@pytest.mark.parametrize("count", [0, 1, 2, 70, 3000])
def test_a_table_finds_what_a_dict_finds(count: int) -> None:
    rng = np.random.default_rng(count)
    keys = random_keys(rng, count)
    table, order = KeyTable.sort(key_digests(pa.array(keys, pa.string())))
    first: dict[str, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    wanted = [*keys, *random_keys(rng, count), "", "A" * 64, "g" * 64]
    array = pa.chunked_array([pa.array(wanted[:3]), pa.array(wanted[3:], pa.string())], pa.string())
    places = table.find(key_digests(array))
    found = [None if place < 0 else int(order[place]) for place in places]
    assert found == [first.get(key) for key in wanted]
    assert table.is_first().sum() == len(first) == len(set(map(tuple, table.digests().tolist())))


def test_digests_that_agree_in_their_first_half_are_told_apart() -> None:
    digests = np.array([[7, 3], [7, 1], [5, 1], [7, 3], [7, 2]], np.uint64)
    table, order = KeyTable.sort(digests)
    assert order[table.find(digests)].tolist() == [0, 1, 2, 0, 4]
    assert table.contains(np.array([[7, 4], [7, 0], [6, 1], [8, 0]], np.uint64)).tolist() == [False] * 4
    assert table.is_first().sum() == 4


def test_every_digit_of_a_content_key_counts() -> None:
    keys = ["0" * 64, *("0" * at + digit + "0" * (63 - at) for at in range(64) for digit in "19af")]
    assert len(np.unique(key_digests(pa.array(keys)), axis=0)) == len(keys)


def test_a_null_is_in_no_table() -> None:
    table, _ = KeyTable.sort(key_digests(pa.array([content_key(1)])))
    assert table.contains(key_digests(pa.array([None, content_key(1)]))).tolist() == [False, True]


def add_shards(folder: Path, first: int, count: int) -> None:
    """Shards of two images with their number as features."""
    for number in range(first, first + count):
        keys = [content_key(2 * number), content_key(2 * number + 1)]
        write_shard(folder, keys, np.full((2, 1, 1), number, np.float32))


def parts_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("index/*.parquet")}


def assert_same_rows(folder: Path, num_shards: int) -> None:
    """The store has every image once, with its features."""
    rows = ManifestRows.read(storage_path(folder))
    assert len(rows.keys) == 2 * num_shards == rows.keys.is_first().sum() and len(rows.shards) == num_shards
    keys = [content_key(number) for number in range(2 * num_shards)]
    expected = np.repeat(np.arange(num_shards), 2).astype(np.float32)
    assert np.array_equal(gather(FeatureStore(folder), keys).ravel(), expected)


def test_full_parts_of_an_index_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SHARDS_PER_PART", 3)
    monkeypatch.setattr(index, "MAX_LOOSE", 1)
    folder, num_shards = storage_path(tmp_path), 0
    before: dict[str, bytes] = {}
    for count in (5, 1, 2, 7):
        add_shards(tmp_path, num_shards, count)
        num_shards += count
        write_index(folder)
        after = parts_of(tmp_path)
        sizes = sorted(len(pq.read_table(path)) // 2 for path in tmp_path.glob("index/*.parquet"))
        if count == 1:  # too few for a change
            assert after == before
        else:
            assert sum(sizes) == num_shards and sizes.count(3) == num_shards // 3
            full = {name for name, data in before.items() if len(pq.read_table(pa.BufferReader(data))) == 6}
            assert full <= after.keys()
        assert_same_rows(tmp_path, num_shards)
        before = after
    assert all(len(table) <= 6 for table in read_manifests(folder))


def test_two_extractions_at_once_write_parts_with_the_same_shards(tmp_path: Path) -> None:
    add_shards(tmp_path, 0, 20)
    write_index(storage_path(tmp_path))
    (first,) = parts_of(tmp_path).items()
    add_shards(tmp_path, 20, 20)
    write_index(storage_path(tmp_path))
    (tmp_path / "index" / first[0]).write_bytes(first[1])  # the other one is slower
    assert len(parts_of(tmp_path)) == 2
    assert_same_rows(tmp_path, 40)
    lost = next(tmp_path.glob("manifest/*.parquet"))
    lost.unlink()
    assert len(FeatureStore(tmp_path)) == 78, "a shard without its manifest does not exist"


def test_a_shard_that_is_computed_again_with_other_bits_is_whole(tmp_path: Path) -> None:
    """Its name is that of the damaged one, whose digest the index has."""
    add_shards(tmp_path, 0, 20)
    write_index(storage_path(tmp_path))
    keys = [content_key(0), content_key(1)]
    damaged = tmp_path / "shards" / f"{shard_name(keys)}.npy"
    flip_any(damaged)
    remove_damaged(tmp_path, pa.array(keys))
    write_shard(tmp_path, keys, np.full((2, 1, 1), 7, np.float32))
    write_index(storage_path(tmp_path))
    assert not FeatureStore(tmp_path).damaged(pa.array(keys))
    assert np.array_equal(gather(FeatureStore(tmp_path), keys).ravel(), [7, 7])


def test_rows_of_more_text_than_arrow_joins_are_taken() -> None:
    """500 chunks of 8 MB, which are the same one in memory, have more than 2 GiB together."""
    chunk = pa.array(["x" * 8_000_000])
    dataset = Dataset(pa.table({"key": pa.chunked_array([chunk] * 500)}))
    rows = np.array([0, 3, 499])
    (part,) = dataset.rounds(rows, "key")
    assert len(part) == 3 and sum(len(each) for each in Selection(dataset, rows).chunks("key")) == 3


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
    assert (plan.num_images, plan.missing.tolist(), plan.unusable) == (num_images, missing, unusable)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_rounds_have_every_row_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycap.pipeline.data.dataset.ROUND_ROWS", size)
    rng = np.random.default_rng(size)
    chunks = [pa.array(map(str, range(start, start + 10))) for start in range(0, 70, 10)]
    dataset = Dataset(pa.table({"key": pa.chunked_array(chunks)}))
    rows = np.flatnonzero(rng.random(70) < 0.4)
    parts = list(dataset.rounds(rows, "key"))
    assert all(len(part) == size for part in parts[:-1])
    assert [key for part in parts for key in part["key"].to_pylist()] == list(map(str, rows))
    assert list(dataset.rounds(rows[:0], "key")) == []
