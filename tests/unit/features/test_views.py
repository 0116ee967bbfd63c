"""Views of training images: their rows in an extraction, their pixels, and which one an epoch reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycap.models.config import Augmentation, Views, content_key_of, seed_of_key
from raycap.models.encoders.transform import ImageTransform, augmented
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data import images as images_module
from raycap.pipeline.data.images import decode_batch, decode_image, read_image_file
from raycap.pipeline.features.extraction import plan_extraction, with_views
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store import QUARANTINE, FeatureStore, write_quarantine
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import read_cache
from raycap.pipeline.training.batches import Batches, CaptionTokens, view_seeds
from tests.support.runs import prepare_run

VIEWS = Views(3, Augmentation())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prepare_run(tmp_path_factory.mktemp("run"), features={"views": 3, "compute_dtype": "float32"})


def test_training_images_have_views_and_others_have_none(run: Any) -> None:
    folder, store = run
    config, dataset = folder.config, folder.dataset
    rows = with_views(dataset, config)
    splits = dict(zip(dataset.column("key"), dataset.column("split"), strict=True))
    expected = [
        key for content, split in splits.items() for key in (VIEWS.keys(content) if split == "train" else [content])
    ]
    assert rows.column("key") == expected and FeatureStore(store).contains(rows.table["key"]).all()
    both = config.model_copy(update={"data": config.data.model_copy(update={"test_splits": ("train",)})})
    counts = Counter(splits[content_key_of(key)] for key in with_views(dataset, both).column("key"))
    sizes = Counter(splits.values())
    assert counts["train"] == 4 * sizes["train"] and counts["val"] == sizes["val"]
    plain = config.model_copy(update={"features": config.features.model_copy(update={"views": 0})})
    assert with_views(dataset, plain) is dataset


def test_decoded_views_are_the_augmented_images(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    rows = with_views(folder.dataset, folder.config).table.slice(0, 12)
    batch = {name: rows[name].to_numpy(zero_copy_only=False) for name in ("key", "uri")}
    read: list[str] = []

    def counted(path: StoragePath, key: str) -> bytes:
        read.append(str(path))
        return read_image_file(path, key)

    monkeypatch.setattr(images_module, "read_image_file", counted)
    found = decode_batch(batch, ImageTransform(32), 10**6, augmentation=VIEWS.augmentation)
    assert set(found["reason"]) == {""} and len(read) == len(set(batch["uri"])) < 12, "each image is read once"
    transform = ImageTransform(32)
    for key, uri, pixels in zip(batch["key"], batch["uri"], found["pixels"], strict=True):
        image, seed = decode_image(read_image_file(StoragePath(uri)), 10**6), seed_of_key(key)
        resize = transform.resize
        expected = resize(image) if seed is None else augmented(image, VIEWS.augmentation, seed, resize)
        assert np.array_equal(pixels, expected)


def batches_of(folder: Any, images: Images, *, rank: int = 0, world_size: int = 1) -> Batches:
    section = StageSection(name="s", objective="cross_entropy", epochs=1, batch_size=8, captions_per_image=2, lr=1)
    train = folder.dataset.split("train")
    captions = CaptionTokens.of(train, folder.vocabulary)
    return Batches(images, captions, section, seed=5, rank=rank, world_size=world_size)


def test_every_epoch_reads_one_stored_view_of_each_image(run: Any) -> None:
    """The view depends on seed, epoch and image, and not on the number of workers or on earlier batches."""
    folder, store = run
    train = folder.dataset.split("train")
    features = FeatureStore(store)
    images = Images(train, features, 10**6, 1, views=VIEWS)
    batches = batches_of(folder, images)
    stored = features.gather_at(features.locate(with_views(train, folder.config).table["key"]))
    stored = stored.reshape(len(train), VIEWS.count, *stored.shape[1:])
    seen: dict[tuple[int, int], int] = {}
    for step in range(30 * len(train) // 8):
        (batch,) = batches.at(step)
        for place, (row, tokens) in enumerate(zip(batch.images.tolist(), batch.features.tokens, strict=True)):
            (view,) = np.flatnonzero((stored[row] == tokens.numpy()).all((1, 2)))
            epoch = (step * 8 + place) // len(train)
            assert seen.setdefault((epoch, row), int(view)) == view
    shares = np.bincount(list(seen.values()), minlength=3) / len(seen)
    assert np.abs(shares - 1 / 3).max() < 5 * (2 / 9 / len(seen)) ** 0.5, "all views are equally frequent"
    assert all(len({seen[epoch, row] for epoch in range(30)}) == 3 for row in range(len(train)))
    (whole,) = batches.at(4)
    parts = [batches_of(folder, images, rank=rank, world_size=2).at(4)[0].features.tokens for rank in range(2)]
    assert torch.equal(whole.features.tokens, torch.cat(parts))


def test_images_on_the_fly_are_augmented_by_the_same_seeds(run: Any) -> None:
    folder, _ = run
    train = folder.dataset.split("train")
    images = Images(train, ImageTransform(32), 10**6, 2, views=VIEWS)
    (batch,) = batches_of(folder, images).at(3)
    rows, epochs = batch.images.numpy(), (np.arange(8) + 24) // len(train)
    assert torch.equal(batch.features.tokens, images.load(rows, view_seeds(rows, epochs, 5)).tokens)
    for row, seed, pixels in zip(rows, view_seeds(rows, epochs, 5), batch.features.tokens, strict=True):
        image = decode_image(Path(train.column("uri")[row]).read_bytes(), 10**6)
        assert np.array_equal(pixels, augmented(image, VIEWS.augmentation, int(seed), ImageTransform(32).resize))
    plain = Images(train, ImageTransform(32), 10**6, 2).load(rows).tokens
    assert not torch.equal(batch.features.tokens, plain)


def test_an_unusable_image_has_no_views_to_compute(run: Any, tmp_path: Path) -> None:
    folder, _ = run
    rows, place = with_views(folder.dataset, folder.config), StoragePath(str(tmp_path))
    bad = folder.dataset.split("train").column("key")[4]
    write_quarantine(place, rows, {bad: "empty file"}, {})
    (quarantined,) = read_cache(place / "quarantine.parquet", QUARANTINE).to_pylist()
    assert quarantined["key"] == bad and quarantined["reason"] == "empty file"
    plan = plan_extraction(rows, place, 10**6)
    assert plan.unusable == {bad: "empty file"} and len(plan.missing) == len(rows) - VIEWS.count
    assert bad not in {content_key_of(key) for key in plan.missing["key"].to_pylist()}
