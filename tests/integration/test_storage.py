"""S3 with refused requests and cut connections: readers and writers do not notice them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.content_keys import take_snapshot
from raycap.pipeline.data.reading import read_dataset
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store import FeatureStore, write_shard
from raycap.pipeline.storage import s3
from raycap.pipeline.storage.cache import ImageCache
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from tests.conftest import write_karpathy
from tests.support.features import gather
from tests.support.s3_server import s3_server


@pytest.fixture(scope="module")
def options() -> Iterator[StorageOptions]:
    with s3_server(share=0.1) as url:
        yield StorageOptions(url)


def test_objects_come_back_as_they_were_written(options: StorageOptions) -> None:
    folder = StoragePath("s3://data/objects", options)
    bodies = {f"{number}/x": bytes([number]) * (number * 1000 + 1) for number in range(40)}
    for name, body in bodies.items():
        (folder / name).write_bytes(body)
    assert {name: entry.size for name, entry in folder.list().items()} == {k: len(v) for k, v in bodies.items()}
    for name, body in bodies.items():
        assert (folder / name).read_bytes() == body
    assert (folder / "7/x").read_range(10, 5) == bytes([7]) * 5
    (folder / "7/x").delete()
    assert not (folder / "7/x").exists() and (folder / "8/x").exists()
    with pytest.raises(FileNotFoundError):
        (folder / "7/x").read_bytes()


def test_large_objects_are_transferred_in_parts(
    options: StorageOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)  # S3's own minimum
    body = np.random.default_rng(0).bytes(13 * 2**20)
    large = StoragePath("s3://data/large", options)
    large.write_bytes(body)
    with pytest.raises(OSError, match=f"larger than {len(body) - 1} bytes"):
        large.read_bytes(len(body) - 1)
    assert large.read_bytes(len(body)) == body and large.stat().tag.strip('"').endswith("-3")
    assert large.download(tmp_path / "down") == large.stat() and (tmp_path / "down").read_bytes() == body
    (tmp_path / "up").write_bytes(body[::-1])
    assert large.upload(tmp_path / "up") == large.stat().tag and large.stat().tag.strip('"').endswith("-3")
    assert large.read_bytes() == body[::-1]


def test_a_remote_store_is_cached_within_its_limit(options: StorageOptions, tmp_path: Path) -> None:
    folder, rng = StoragePath("s3://data/store", options), np.random.default_rng(0)
    rows = rng.normal(size=(40, 6, 50)).astype(np.float16)
    keys = [f"k{number}" for number in range(40)]
    for start in range(0, 40, 8):
        write_shard(folder, keys[start : start + 8], rows[start : start + 8])
    size = 8 * 6 * 50 * 2 + 128
    order = rng.permutation(40)
    for limit in (10 * size, 2 * size + 10, 10):  # all fits; two of five shards; none: ranges
        cache = tmp_path / str(limit)
        store = FeatureStore(folder, cache=cache, cache_bytes=limit)
        for _ in range(2):
            assert np.array_equal(gather(store, [keys[row] for row in order]), rows[order])
        staged = sum(path.stat().st_size for path in cache.glob("*.npy"))
        assert staged == min(5, limit // size) * size
    assert store.verify() == []


def test_images_are_fetched_once_and_checked_by_digest(
    options: StorageOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end-to-end stage reads its images in every epoch, from a cache or, without space in it, from S3."""
    local = write_karpathy(tmp_path / "set", {"train": 6, "val": 1, "test": 1})
    for path in local.rglob("*.*"):
        StoragePath(f"s3://data/epochs/{path.relative_to(local)}", options).write_bytes(path.read_bytes())
    found = read_dataset(DataSection(root="s3://data/epochs"), "s3://data/epochs", options)
    dataset = take_snapshot(found, tmp_path / "there.parquet", options)[0].split("train")
    here = read_dataset(DataSection(root=str(local)), local).split("train")
    expected = Images(here, ImageTransform(16), 10**6, 1).load(np.arange(6)).tokens

    reads: list[str] = []
    original = StoragePath.read_bytes
    monkeypatch.setattr(StoragePath, "read_bytes", lambda self, *limit: (reads.append(self.name), original(self))[1])
    for limit, left in ((2**30, 6), (0, 0)):
        cache = ImageCache(tmp_path / str(limit), limit)
        images = Images(dataset, ImageTransform(16), 10**6, 1, options, cache)
        for _ in range(2):
            assert torch.equal(images.load(np.arange(6)).tokens, expected)
        assert sum(path.suffix != ".lock" for path in (tmp_path / str(limit)).glob("*/*")) == left
    assert len(reads) == 6 + 12, "cached, and not cached"
    StoragePath("s3://data/epochs/images/1.png", options).write_bytes((local / "images" / "0.png").read_bytes())
    with pytest.raises(StorageError, match="1.png: its content does not have the recorded digest"):
        images.load(np.array([1]))  # alone, so that no thread asks for others after the server has ended
