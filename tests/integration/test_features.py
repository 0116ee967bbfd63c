"""Extraction with Ray Data: every image once, trouble listed, nothing computed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from models.backbone import Backbone
from models.config import BackboneConfig
from models.transform import ImageTransform
from pipeline.config import DataSection, FeatureSection
from pipeline.dataset import read_dataset
from pipeline.features import Extractor, extract
from pipeline.images import decode_image
from pipeline.snapshot import take_snapshot
from pipeline.store import FeatureStore
from pipeline.weights import save_weights
from tests.conftest import write_karpathy


@pytest.mark.ray
def test_features_of_good_images_and_reasons_for_bad_ones(tmp_path: Path, ray_session: None) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 20, "val": 4, "test": 4})
    (root / "images" / "3.png").write_bytes((root / "images" / "3.png").read_bytes()[:60])
    (root / "images" / "5.png").write_bytes(b"not a picture")
    (root / "images" / "7.png").write_bytes((root / "images" / "6.png").read_bytes())
    dataset, _ = take_snapshot(read_dataset(DataSection(root=str(root)), root), tmp_path / "manifest.parquet")
    config = BackboneConfig(
        "swin_tiny_patch4_window7_224", image_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4
    )
    torch.manual_seed(0)
    backbone = Backbone(config).eval()
    save_weights(backbone, tmp_path / "backbone.safetensors")
    settings = FeatureSection(compute_dtype="float32", stored_dtype="float32", rows_per_shard=8)
    extractor = Extractor(config, tmp_path / "backbone.safetensors", settings, 10**6)
    lines: list[str] = []
    folder, bad = extract(dataset, tmp_path / "features", extractor, lambda: None, lines.append)
    keys = dataset.column("key")
    assert set(bad) == {keys[3], keys[5]} and "not an image" in bad[keys[5]]
    listed = pq.read_table(folder / "quarantine.parquet").to_pylist()
    assert {row["uri"] for row in listed} == {str(root / "images" / name) for name in ("3.png", "5.png")}

    store = FeatureStore(folder)
    assert len(store) == 25, "28 images, two bad, two the same"
    transform = ImageTransform(32)
    for row in (0, 6, 7, 27):
        pixels = transform(decode_image((root / "images" / f"{row}.png").read_bytes(), 10**6))
        with torch.inference_mode():
            expected = backbone(pixels[None])[0].numpy()
        assert np.allclose(store.gather([keys[row]])[0], expected, atol=1e-5)

    def refuse() -> None:
        pytest.fail("Ray was asked for though nothing is missing")

    again, bad_again = extract(dataset, tmp_path / "features", extractor, refuse, lines.append)
    assert again == folder and bad_again == bad
    assert "0 to compute" in lines[-1]
