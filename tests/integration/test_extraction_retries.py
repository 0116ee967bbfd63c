"""An extraction repeats what a dying actor or a failing storage interrupts; no image is lost or counted twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycap.models.config import BackboneConfig
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.cluster import stalls
from raycap.pipeline.config.sections import DataSection, FeatureSection
from raycap.pipeline.data.content_keys import take_snapshot
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import read_dataset
from raycap.pipeline.features import extraction
from raycap.pipeline.features.extraction import Extractor, ShardWriter, extract
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from raycap.pipeline.storage.weights import save_weights
from tests.conftest import write_karpathy

NUM_IMAGES = 12
pytestmark = pytest.mark.ray


class WaitingWriter(ShardWriter):
    """A writer whose first call waits for the beginning of the second, in the same process."""

    def __init__(self, folder: StoragePath, extractor: Extractor, weights: Any = None) -> None:
        super().__init__(folder, extractor, weights)
        self.is_first_call, self.second_call = True, threading.Event()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.is_first_call:
            self.is_first_call = False
            if not self.second_call.wait(60):
                raise RuntimeError("the actor makes one call after the other")
        self.second_call.set()
        return super().__call__(batch)


@pytest.fixture
def images(tmp_path: Path) -> Dataset:
    root = write_karpathy(tmp_path / "set", {"train": NUM_IMAGES - 2, "val": 1, "test": 1})
    dataset, _ = take_snapshot(read_dataset(DataSection(root=str(root)), root), tmp_path / "manifest.parquet")
    return dataset


@pytest.fixture
def extractor(tmp_path: Path) -> Extractor:
    config = BackboneConfig(
        "swin_tiny_patch4_window7_224", image_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4
    )
    (tmp_path / "events").mkdir()
    save_weights(Backbone(config), tmp_path / "events" / "backbone.safetensors")
    settings = FeatureSection(compute_dtype="float32", rows_per_shard=4, max_images_for_tasks=0)
    return Extractor(config, tmp_path / "events" / "backbone.safetensors", settings, 10**6)


def not_watched() -> AbstractContextManager[Callable[[], object]]:
    return nullcontext(lambda: None)


def test_an_actor_computes_a_shard_while_it_writes_another(
    ray_session: None, tmp_path: Path, images: Dataset, extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "ShardWriter", WaitingWriter)
    folder, unusable = extract(images, tmp_path / "features", extractor, not_watched)
    assert len(FeatureStore(folder)) == NUM_IMAGES and not unusable


def test_a_storage_that_keeps_failing_ends_the_extraction_with_its_own_message(
    ray_session: None, tmp_path: Path, images: Dataset, extractor: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image goes to the quarantine, because the images are not at fault."""
    unreachable = StorageOptions("http://127.0.0.1:9", "us-east-1", retry_minutes=0)
    uris = [f"s3://data/images/{key}" for key in images.column("key")]
    table = images.table.set_column(images.table.schema.get_field_index("uri"), "uri", [uris])
    monkeypatch.setattr(stalls, "MAX_STORAGE_RETRIES", 0)
    with pytest.raises(StorageError, match=r"^s3://data/images/\w+: storage failed") as raised:
        extract(Dataset(table), tmp_path / "features", replace(extractor, options=unreachable), not_watched)
    assert "\n" not in str(raised.value)
