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
from pipeline.config.load import load_config
from pipeline.features.store import FeatureStore
from pipeline.runs.identity import config_identity
from tests.conftest import small_config
from tests.support.damage import flip_any, replace_by_garbage
from tests.support.features import positions


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
    config["features"] = {"hdf5": str(tmp_path / "regions.hdf5"), "max_regions": 9, "truncate_regions": True}
    config["features"]["rows_per_shard"] = 4
    config["stages"] = [stage for stage in config["stages"] if not stage.get("train_backbone")]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return regions, tmp_path / "run.yaml"


def test_import_with_lengths_and_boxes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regions, config = make(tmp_path)
    assert main(["extract", str(config), "--verify"]) == 0
    (folder,) = (tmp_path / "storage" / "features").iterdir()
    store = FeatureStore(folder)
    assert len(store) == 10
    rows = positions(store, [f"id-{number}" for number in regions])
    stored, (lengths, stored_boxes) = store.gather_at(rows), store.regions_at(rows)
    assert lengths is not None and stored_boxes is not None
    assert stored.dtype == np.float16 and stored.shape == (10, 9, 7)
    for row, (features, boxes) in enumerate(regions.values()):
        count = min(len(features), 9)
        assert lengths[row] == count
        assert np.array_equal(stored[row, :count], features[:9].astype(np.float16))
        assert not stored[row, count:].any()
        assert np.allclose(stored_boxes[row, :count], boxes[:9])
    capsys.readouterr()
    assert main(["extract", str(config)]) == 0
    assert "10 of 12 images there, 2 to import" in capsys.readouterr().out


def test_a_damaged_store_is_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the next extraction, which names every file."""
    _, config = make(tmp_path)
    assert main(["extract", str(config)]) == 0
    (folder,) = (tmp_path / "storage" / "features").iterdir()
    whole = {path: path.read_bytes() for path in folder.glob("shards/*")}
    for pattern, damage in (("shards/*", flip_any), ("manifest/*", replace_by_garbage), ("shards/*", Path.unlink)):
        path = sorted(folder.glob(pattern))[0]
        capsys.readouterr()
        damage(path)
        assert main(["extract", str(config), "--verify"]) == 0
        output = capsys.readouterr().out
        assert f"damaged   {path} " in output and "0 images are missing" in output
        assert {path: path.read_bytes() for path in folder.glob("shards/*")} == whole


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, config = make(tmp_path)
    assert main(["extract", str(config), "--set", "data.max_bad_fraction=0.1"]) == 1, "2 of 12 are more than 10 %"
    assert main(["extract", str(config), "--set", f"features.hdf5={config}"]) == 2
    assert main(["extract", str(config), "--set", "features.hdf5=nowhere.hdf5"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "cannot be opened as HDF5" in errors[0] and "does not exist" in errors[1] and len(errors) == 2


def changed(config: Path, **keys: Any) -> Path:
    """The configuration with other sections."""
    values = yaml.safe_load(config.read_text())
    for key, value in keys.items():
        values[key] = value
    config.write_text(yaml.safe_dump(values))
    return config


def test_more_regions_than_the_maximum_are_refused_unless_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = make(tmp_path)
    assert main(["extract", str(config), "--set", "features.truncate_regions=false"]) == 2
    error = capsys.readouterr().err
    assert "image 8 has 10 regions, and features.max_regions is 9; raise it, or set features.truncate_regions" in error
    assert (
        main(["extract", str(config), "--set", "features.truncate_regions=false", "--set", "features.max_regions=12"])
        == 0
    )


def test_a_model_that_arranges_regions_is_refused_without_boxes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = make(tmp_path)
    model = {
        "name": "clustformer",
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
    }
    changed(config, model=model | {"inputs": "regions", "sampling": 1, "region_rows": 2})
    for image_id in (5, 1):  # one among others, found at the import; the first image, found before anything is written
        with h5py.File(tmp_path / "regions.hdf5", "a") as file:
            del file[f"{image_id}_boxes"]
        assert main(["run", str(config)] if image_id == 1 else ["extract", str(config)]) == 2
        error = capsys.readouterr().err
        assert f"has no {image_id}_boxes, and clustformer arranges regions by their boxes" in error, error
    assert not (tmp_path / "storage" / "runs").exists()
    assert main(["extract", str(config), "--set", "model.encoder_clusters=none"]) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["stages.xe_frozen.train_backbone=true"], "stages.xe_frozen.train_backbone is true, and with features.hdf5"),
        (["features.hdf5=synthetic"], "data.synthetic is not set"),
        (["model.name=clustformer"], "set model.inputs to regions"),
        (["features.hdf5=null", "model.name=clustformer", "model.inputs=regions", "model.sampling=1"], "features.hdf5"),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = make(tmp_path)
    values = yaml.safe_load(config.read_text())
    if any("clustformer" in option for option in options):
        values["model"] = {"d_model": 16, "num_heads": 2}
        config.write_text(yaml.safe_dump(values))
    assert main(["run", str(config), *(part for option in options for part in ("--set", option))]) == 2
    message = capsys.readouterr().err.strip()
    assert named in message and "\n" not in message


def test_boxes_of_some_images_only(tmp_path: Path) -> None:
    """For models that leave boxes alone a file may have them for some images: the others' are zeros."""
    regions, config = make(tmp_path)
    with h5py.File(tmp_path / "regions.hdf5", "a") as file:
        for image_id in (5, 6, 7, 8, 9):
            del file[f"{image_id}_boxes"]
    assert main(["extract", str(config)]) == 0
    (folder,) = (tmp_path / "storage" / "features").iterdir()
    store = FeatureStore(folder)
    _, boxes = store.regions_at(positions(store, [f"id-{number}" for number in regions]))
    assert boxes is not None and boxes[0].any() and not boxes[4:9].any() and boxes[9].any()


def test_a_run_is_named_by_its_regions(tmp_path: Path) -> None:
    """Another file, another maximum: another run; the same bytes elsewhere are the same one."""
    _, path = make(tmp_path)
    first = config_identity(load_config(path))
    (tmp_path / "elsewhere.hdf5").write_bytes((tmp_path / "regions.hdf5").read_bytes())
    assert config_identity(load_config(path, [f"features.hdf5={tmp_path / 'elsewhere.hdf5'}"])) == first
    assert config_identity(load_config(path, ["features.max_regions=8"])) != first
    with h5py.File(tmp_path / "regions.hdf5", "a") as file:
        file["12_features"] = np.ones((2, 7), np.float32)
    assert config_identity(load_config(path)) != first


def test_check_looks_at_the_file_and_not_for_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, config = make(tmp_path)
    main(["check", str(config)])
    output = capsys.readouterr().out
    assert "1 of 12 images cannot be used" in output and "the file has no 12_features" in output
