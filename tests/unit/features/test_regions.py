"""Detector features from HDF5 files into the store, with their lengths and boxes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.features.regions import open_regions, read_image
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runs.identity import config_identity
from tests.conftest import ROOT, small_config
from tests.support.features import positions, write_bomb


def make(tmp_path: Path) -> tuple[dict[int, Any], Path]:
    """Writes a file of ten images with 3 to 12 regions, and one without boxes whose features are not finite.

    Returns the regions, and a configuration of these images and one that the file lacks."""
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


def test_a_run_is_named_by_its_regions(tmp_path: Path) -> None:
    """Another file or another maximum of regions makes another run. The same bytes elsewhere do not."""
    _, path = make(tmp_path)
    first = config_identity(load_config(path))
    (tmp_path / "elsewhere.hdf5").write_bytes((tmp_path / "regions.hdf5").read_bytes())
    assert config_identity(load_config(path, [f"features.hdf5={tmp_path / 'elsewhere.hdf5'}"])) == first
    assert config_identity(load_config(path, ["features.max_regions=8"])) != first
    with h5py.File(tmp_path / "regions.hdf5", "a") as file:
        file["12_features"] = np.ones((2, 7), np.float32)
    assert config_identity(load_config(path)) != first


FEATURES = np.arange(6, dtype=np.float32).reshape(2, 3)


def group(file: h5py.File) -> None:
    file.create_group("1_features")


def loop(file: h5py.File) -> None:
    file["1_features"] = h5py.SoftLink("/2_features")
    file["2_features"] = h5py.SoftLink("/1_features")


def external_link(file: h5py.File) -> None:
    file["1_features"] = h5py.ExternalLink(Path(file.filename).with_name("pipe"), "x")


def external_storage(file: h5py.File) -> None:
    secret = Path(file.filename).with_name("secret")
    secret.write_bytes(bytes(24))
    file.create_dataset("1_features", (2, 3), "f4", external=[(secret, 0, 24)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((2, 3), "f4")
    layout[:] = h5py.VirtualSource(Path(file.filename).with_name("missing.hdf5"), "x", (2, 3))
    file.create_virtual_dataset("1_features", layout)


def declared(file: h5py.File) -> None:
    file.create_dataset("1_features", (5, 10**9), "f4")


def bomb(file: h5py.File) -> None:
    write_bomb(file, "1_features", 1)


def lzf(file: h5py.File) -> None:
    file.create_dataset("1_features", data=FEATURES, compression="lzf")


def not_stored(file: h5py.File) -> None:
    file.create_dataset("1_features", (5, 3), "f4")


def tiny_chunks(file: h5py.File) -> None:
    file.create_dataset("1_features", (100, 101), "f4", chunks=(1, 1), compression="gzip", fillvalue=7)[0, 0] = 1


READ = """
import sys
from pathlib import Path
from raycap.pipeline.features.regions import open_regions, read_image
for path in sys.argv[1:]:
    with open_regions(Path(path)) as file:
        try:
            read_image(file, 1, 10, "float16")
        except ValueError as error:
            print(error)
"""


def test_the_features_must_be_whole_and_in_the_file_itself(tmp_path: Path) -> None:
    """In a process with a time limit, because opening a pipe through a link waits for a writer."""
    os.mkfifo(tmp_path / "pipe")
    cases = {
        group: "1_features is no data set",
        loop: "1_features is a link to /2_features",
        external_link: "1_features is a link to x; the file must contain the values itself",
        external_storage: "1_features has its values in another file",
        virtual: "1_features has its values in another file",
        declared: "1_features has 20000000000 bytes, more than",
        bomb: "1_features cannot be read: a chunk decompresses to more than its 100 bytes",
        lzf: "1_features has the HDF5 filters [32000]",
        not_stored: r"1_features has shape (5, 3) and no stored values",
        tiny_chunks: "1_features has 10100 chunks, more than 10000; write it with larger ones",
    }
    for make_file in cases:
        with h5py.File(tmp_path / f"{make_file.__name__}.hdf5", "w") as file:
            make_file(file)
    command = [sys.executable, "-c", READ, *(str(tmp_path / f"{make_file.__name__}.hdf5") for make_file in cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stdout + done.stderr
    for line, reason in zip(lines, cases.values(), strict=True):
        assert line.startswith(reason), line


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "fletcher32": True}])
def test_gzip_changes_no_value(tmp_path: Path, options: dict[str, Any]) -> None:
    values = np.random.default_rng(0).normal(size=(10, 7)).astype(np.float32)
    with h5py.File(tmp_path / "f", "w") as file:
        stored = file.create_dataset("1_features", data=values, chunks=(3, 4), compression="gzip", **options)
        if not options:  # libhdf5 stores a chunk as it is when compression fails
            stored.id.write_direct_chunk((0, 0), values[:3, :4].tobytes(), filter_mask=1)
    with open_regions(tmp_path / "f") as file:
        assert np.array_equal(read_image(file, 1, 9, "float32")[0], values[:9])


def test_a_damaged_image_is_quarantined_and_the_others_are_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One image has a flipped bit in a compressed chunk, and the first one is a group."""
    _, config = make(tmp_path)
    values = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    with h5py.File(tmp_path / "regions.hdf5", "a") as file:
        del file["3_features"], file["1_features"]
        file.create_group("1_features")
        stored = file.create_dataset("3_features", data=values, chunks=(5, 7), compression="gzip")
        offset = stored.id.get_chunk_info(0).byte_offset
    data = bytearray((tmp_path / "regions.hdf5").read_bytes())
    data[offset + 20] ^= 1
    (tmp_path / "regions.hdf5").write_bytes(data)
    assert main(["extract", str(config), "--set", "data.max_bad_fraction=0.4"]) == 0
    assert "4 of 12 images gave no features" in capsys.readouterr().out
    (folder,) = (tmp_path / "storage" / "features").iterdir()
    table = pq.read_table(folder / "quarantine.parquet").to_pylist()
    reasons = {row["key"]: row["reason"] for row in table}
    assert reasons["id-3"].startswith("3_features cannot be read: ") and reasons["id-1"].startswith("1_features is no")
    assert len(FeatureStore(folder)) == 8
    assert main(["check", str(config), "--set", "data.max_bad_fraction=0.4"]) in (0, 1)
    assert "1_features is no data set" in capsys.readouterr().out
