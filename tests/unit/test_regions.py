"""Detector features from HDF5 files into the store, with their lengths and boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from jobs.cli import main
from pipeline.store import FeatureStore
from tests.conftest import small_config


def make(tmp_path: Path) -> tuple[dict[int, Any], Path]:
    """Ten images of 3 to 12 regions, one without boxes' partner features, one not finite; and its configuration."""
    rng = np.random.default_rng(0)
    regions = {n: (rng.normal(size=(n + 2, 7)).astype(np.float32), rng.random((n + 2, 4))) for n in range(1, 11)}
    with h5py.File(tmp_path / "regions.hdf5", "w") as file:
        for number, (features, boxes) in regions.items():
            file[f"{number}_features"], file[f"{number}_boxes"] = features, boxes
        file["11_features"] = np.full((2, 7), np.nan, np.float32)
    (tmp_path / "set").mkdir()
    rows = [
        {"image": f"{n}.png", "id": n, "captions": ["a"], "split": {1: "val", 2: "test"}.get(n, "train")}
        for n in range(1, 13)
    ]
    (tmp_path / "set" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"root": str(tmp_path / "set"), "annotations": "t.jsonl", "min_count": 1, "max_bad_fraction": 0.2}
    config = small_config(tmp_path / "storage", data=data)
    config["features"] = {"hdf5": str(tmp_path / "regions.hdf5"), "max_regions": 9, "rows_per_shard": 4}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return regions, tmp_path / "run.yaml"


def test_import_with_lengths_and_boxes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regions, config = make(tmp_path)
    assert main(["extract", str(config), "--verify"]) == 0
    (folder,) = (tmp_path / "storage" / "features").iterdir()
    store = FeatureStore(folder)
    assert len(store) == 10
    found = store.gather_regions([f"id-{number}" for number in regions])
    assert found.boxes is not None and found.features.dtype == np.float16 and found.features.shape == (10, 9, 7)
    for row, (features, boxes) in enumerate(regions.values()):
        count = min(len(features), 9)
        assert found.lengths[row] == count
        assert np.array_equal(found.features[row, :count], features[:9].astype(np.float16))
        assert not found.features[row, count:].any()
        assert np.allclose(found.boxes[row, :count], boxes[:9])
    capsys.readouterr()
    assert main(["extract", str(config)]) == 0
    assert "10 of 12 images there, 2 to import" in capsys.readouterr().out


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, config = make(tmp_path)
    assert main(["extract", str(config), "--set", "data.max_bad_fraction=0.1"]) == 1, "2 of 12 are more than 10 %"
    assert main(["extract", str(config), "--set", f"features.hdf5={config}"]) == 2
    assert main(["extract", str(config), "--set", "features.hdf5=nowhere.hdf5"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "cannot be opened as HDF5" in errors[0] and "does not exist" in errors[1] and len(errors) == 2
