"""The precision `auto` of extractions, and a shard that is written while the next one is computed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycap.models.config import BackboneConfig
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.config.sections import FeatureSection
from raycap.pipeline.features import extraction
from raycap.pipeline.features.extraction import Extractor, ShardWriter
from raycap.pipeline.features.precision import decided_precision
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runtime.processor import PrecisionTimes
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.weights import save_weights

SWIN = BackboneConfig(
    "swin_tiny_patch4_window7_224", image_size=32, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=4
)
WAIT_S = 60


def test_a_storage_measures_once_and_keeps_its_precision(tmp_path: Path) -> None:
    """A second measurement, on another machine for example, could decide otherwise."""
    measured = [PrecisionTimes("this processor", float32=1.0, bfloat16=0.5)]
    place = storage_path(tmp_path)

    def decide(backbone: BackboneConfig = SWIN, folder: StoragePath = place, **settings: Any) -> str:
        return decided_precision(backbone, FeatureSection(**settings), folder, measured.pop)

    assert decide() == "bfloat16" and not measured
    measured.append(PrecisionTimes("another", float32=0.1, bfloat16=0.5))
    assert decide() == decide(batch_size=64, num_actors=3) == "bfloat16" and len(measured) == 1, "kept"
    assert decide(replace(SWIN, gradient_checkpointing=True, drop_path=0.1)) == "bfloat16", "the same features"
    assert decide(compute_dtype="float32") == "float32" and len(measured) == 1, "asked for"
    assert decide(gpus_per_actor=1) == "float32" and not measured, "another kind of device"
    (record,) = [path for path in tmp_path.iterdir() if "this processor" in path.read_text()]
    assert json.loads(record.read_text())["float32"] == 1.0
    for damaged in ("", "{}", '{"precision": "int8"}'):
        record.write_text(damaged)
        measured.append(PrecisionTimes("a third", float32=0.1, bfloat16=0.5))
        assert decide() == decide() == "float32" and not measured, "measured again and kept"


def writer_of(folder: Path) -> ShardWriter:
    save_weights(Backbone(SWIN), folder / "backbone.safetensors")
    settings = FeatureSection(compute_dtype="float32", batch_size=2)
    return ShardWriter(
        storage_path(folder / "store"), Extractor(SWIN, folder / "backbone.safetensors", settings, 10**6)
    )


def batch(number: int) -> dict[str, np.ndarray]:
    pixels = np.random.default_rng(number).integers(0, 256, (3, 32, 32, 3), np.uint8)
    return {"key": np.array([f"{number}-{row}" for row in range(3)]), "pixels": pixels, "reason": np.array([""] * 3)}


def test_a_shard_is_written_while_the_next_one_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write waits for the begin of the second computation. If that waited for the write, both would hang."""
    writer, begun, original = writer_of(tmp_path), threading.Semaphore(0), extraction.write_shard
    features = writer.features

    def computing(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begun.release()
        return features(pixels)

    def writing(*arguments: Any) -> None:
        if arguments[1][0].startswith("0"):
            assert begun.acquire(timeout=WAIT_S) and begun.acquire(timeout=WAIT_S), "the next one was not computed"
        original(*arguments)

    monkeypatch.setattr(writer, "features", computing)
    monkeypatch.setattr(extraction, "write_shard", writing)
    with ThreadPoolExecutor(extraction.CALLS_PER_ACTOR) as pool:
        done = list(pool.map(writer, map(batch, range(4))))
    assert all((each["reason"] == "").all() for each in done)
    assert len(FeatureStore(tmp_path / "store")) == 12


def test_features_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 has no number above 65,504. Each image is checked on the device."""
    writer, backbone = writer_of(tmp_path), Backbone(SWIN).eval()

    def large(images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = backbone(images)
        found[0, 1, 2] = 1e6
        return found

    monkeypatch.setattr(writer.computer, "backbone", large)
    done = writer(batch(1))
    assert [bool(reason) for reason in done["reason"]] == [True, False, True], "the first of each batch of two"
    assert "not finite in float16" in done["reason"][0] and len(FeatureStore(tmp_path / "store")) == 1
