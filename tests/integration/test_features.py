"""Extraction with Ray Data: every image once, unusable images listed, nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from raycap.models.config import BackboneConfig
from raycap.models.encoders.backbone import Backbone
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.cluster import stalls
from raycap.pipeline.config.sections import DataSection, FeatureSection
from raycap.pipeline.data.content_keys import take_snapshot
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import decode_image
from raycap.pipeline.data.reading import read_dataset
from raycap.pipeline.errors import DamagedError
from raycap.pipeline.features.extraction import Extractor, extract
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from raycap.pipeline.storage.weights import load_weights, save_weights
from tests.conftest import write_karpathy
from tests.support.damage import flip_any
from tests.support.features import gather
from tests.support.logs import on_message

SWIN = BackboneConfig(
    "swin_tiny_patch4_window7_224", image_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4
)


def make_extractor(folder: Path, **settings: Any) -> Extractor:
    """An extractor with random weights, in float32."""
    torch.manual_seed(0)
    save_weights(Backbone(SWIN), folder / "backbone.safetensors")
    values = {"compute_dtype": "float32", "stored_dtype": "float32", "rows_per_shard": 8} | settings
    return Extractor(SWIN, folder / "backbone.safetensors", FeatureSection(**values), 10**6)


def not_watched() -> AbstractContextManager[Callable[[], object]]:
    return nullcontext(lambda: None)


@pytest.mark.ray
def test_features_of_usable_images_and_reasons_for_others(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.data.read_api.cached_remote_fn", lambda _: pytest.fail("a task for each block of names"))
    root = write_karpathy(tmp_path / "set", {"train": 20, "val": 4, "test": 4})
    (root / "images" / "3.png").write_bytes((root / "images" / "3.png").read_bytes()[:60])
    (root / "images" / "5.png").write_bytes(b"not a picture")
    (root / "images" / "7.png").write_bytes((root / "images" / "6.png").read_bytes())
    dataset, _ = take_snapshot(read_dataset(DataSection(root=str(root)), root), tmp_path / "manifest.parquet")
    extractor = make_extractor(tmp_path)
    backbone = Backbone(SWIN).eval()
    load_weights(backbone, extractor.weights)
    lines: list[str] = []
    with on_message(lines.append):
        folder, unusable = extract(dataset, tmp_path / "features", extractor, not_watched)
    keys = dataset.column("key")
    assert set(unusable) == {keys[3], keys[5]} and "not an image" in unusable[keys[5]]
    listed = pq.read_table((folder / "quarantine.parquet").path).to_pylist()
    assert {row["uri"] for row in listed} == {str(root / "images" / name) for name in ("3.png", "5.png")}

    store = FeatureStore(folder)
    assert len(store) == 25, "28 images, two unusable, two equal"
    transform = ImageTransform(32)
    for row in (0, 6, 7, 27):
        pixels = transform(decode_image((root / "images" / f"{row}.png").read_bytes(), 10**6))
        with torch.inference_mode():
            expected = backbone(pixels[None])[0].numpy()
        assert np.allclose(gather(store, [keys[row]])[0], expected, atol=1e-5)

    def refuse() -> NoReturn:
        pytest.fail("Ray was asked for though nothing is missing")

    with on_message(lines.append):
        again, unusable_again = extract(dataset, tmp_path / "features", extractor, refuse)
    assert again == folder and unusable_again == unusable
    assert "0 to compute" in lines[-1]

    (path, *_) = sorted((folder / "shards").path.glob("*.npy"))
    whole = path.read_bytes()
    flip_any(path)
    (damage,) = FeatureStore(folder).verify()
    assert damage.startswith(f"{path} ")
    with pytest.raises(DamagedError):
        gather(FeatureStore(folder), [key for key in keys if key not in unusable])
    extract(dataset, tmp_path / "features", extractor, not_watched)
    assert path.read_bytes() == whole and FeatureStore(folder).verify() == []


@pytest.mark.ray
def test_a_storage_that_keeps_failing_ends_the_extraction_with_its_own_message(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image goes to the quarantine, because the images are not at fault."""
    root = write_karpathy(tmp_path / "set", {"train": 10, "val": 1, "test": 1})
    images, _ = take_snapshot(read_dataset(DataSection(root=str(root)), root), tmp_path / "manifest.parquet")
    unreachable = StorageOptions("http://127.0.0.1:9", "us-east-1", retry_minutes=0)
    uris = [f"s3://data/images/{key}" for key in images.column("key")]
    table = images.table.set_column(images.table.schema.get_field_index("uri"), "uri", [uris])
    extractor = replace(make_extractor(tmp_path, max_images_for_tasks=0), options=unreachable)
    monkeypatch.setattr(stalls, "MAX_STORAGE_RETRIES", 0)
    with pytest.raises(StorageError, match=r"^s3://data/images/\w+: storage failed") as raised:
        extract(Dataset(table), tmp_path / "features", extractor, not_watched)
    assert "\n" not in str(raised.value)
