"""Distillation on Ray: a teacher's captions are computed once, a killed run resumes, and all kinds of input work."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.jobs.cli import main
from raycap.jobs.cluster_captions import NOT_READ, caption_to_store
from raycap.jobs.distillation import caption_training_images
from raycap.jobs.run import train
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.evaluation.captioning.bundle import bundle_source
from raycap.pipeline.runs.distillation import caption_store as caption_store_module
from raycap.pipeline.runs.distillation.caption_store import CaptionStore, images_to_caption
from raycap.pipeline.runs.distillation.teacher import find_teacher
from raycap.pipeline.runs.folder import RunFolder
from tests.conftest import small_config, write_karpathy
from tests.support.distillation import make_teacher, stored_captions
from tests.support.runs import (
    SMALL_MODEL,
    assert_same_weights,
    best_weights,
    output_of,
    start_raycap,
    write_config,
)
from tests.support.searches import write_search

SCENES = {"num_images": 1500, "image_size": 32, "seed": 3}  # 1,200 for training: three chunks


def student(storage: Path, bundle: Path, **changes: Any) -> dict[str, Any]:
    """One stage of cross entropy over pairs, without a dry run."""
    stages = [small_config(storage)["stages"][0] | {"captions_per_image": 1, "epochs": 0.01}]
    settings = {"data__synthetic": SCENES, "stages": stages, "workers__dry_run": False} | changes
    return small_config(storage, **settings) | {"distill": {"model": str(bundle), "captions_per_image": 2}}


def tables(config: RunConfig) -> dict[str, pa.Table]:
    """The chunks of a run's teacher."""
    store = stored_captions(config)
    return dict(zip(store.chunks(), store.read(), strict=True))


def record_of(folder: RunFolder) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder.path / "run.json").read_text())["distilled"]
    return record


@pytest.mark.ray
def test_a_killed_run_resumes_and_another_seed_computes_nothing(
    tmp_path: Path, ray_session: None, log_lines: list[str]
) -> None:
    """The driver is killed between chunks. Later captions, and all weights, are those of an undisturbed run."""
    bundle = make_teacher(tmp_path / "teacher", small_config(tmp_path / "teacher-runs"))
    values = student(tmp_path / "killed", bundle)
    process = start_raycap("run", str(write_config(tmp_path / "run.yaml", values)))
    deadline = time.monotonic() + 400
    while not list((tmp_path / "killed").glob("distilled/*/[!.]*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline, output_of(process)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    num_chunks = len(list((tmp_path / "killed").glob("distilled/*/*.parquet")))
    assert num_chunks < 3, "nothing was left to caption; the kill came too late"
    (run,) = (tmp_path / "killed").glob("runs/*")
    assert json.loads((run / "run.json").read_text())["distilled"] is None

    killed = train(parse_config(values))
    done = 512 * num_chunks
    assert any(f"{done} of 1200 images there, {1200 - done} to caption" in line for line in log_lines)
    whole = train(parse_config(student(tmp_path / "whole", bundle)))
    assert record_of(killed) == record_of(whole) and record_of(whole)["captions"] > 100
    ours, expected = tables(killed.config), tables(whole.config)
    assert ours.keys() == expected.keys() and len(ours) == 3
    assert all(ours[name].equals(expected[name]) for name in ours)
    assert_same_weights(best_weights(killed.stage("xe_frozen")), best_weights(whole.stage("xe_frozen")))

    log_lines.clear()
    other = train(parse_config(student(tmp_path / "whole", bundle, seed=1)))
    assert any("1200 of 1200 images there, 0 to caption" in line for line in log_lines)
    assert record_of(other)["captions"] == record_of(whole)["captions"]
    assert not any(re.search("teacher  .*images/s", line) for line in log_lines)


def few_per_chunk(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Lets tasks write chunks of `count` images."""
    original = caption_store_module.caption_store

    def store(*arguments: Any) -> CaptionStore:
        return replace(original(*arguments), images_per_chunk=count)

    monkeypatch.setattr("raycap.jobs.distillation.caption_store", store)


@pytest.mark.ray
def test_captions_do_not_depend_on_workers_and_earlier_attempts(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers, one worker, and one that finds a chunk of an earlier attempt: the same files."""
    few_per_chunk(monkeypatch, 20)
    bundle = make_teacher(tmp_path / "teacher", small_config(tmp_path / "teacher-runs"))
    found = {}
    for name, workers in (("one", 1), ("three", 3), ("resumed", 1)):
        scenes = SCENES | {"num_images": 60}
        config = parse_config(student(tmp_path / name, bundle, data__synthetic=scenes, workers__num_workers=workers))
        dataset, _ = find_data(config)
        if name == "resumed":
            keys = images_to_caption(config, dataset).column("key")[20:40]
            rows = {row["key"]: row["captions"] for table in found["one"].values() for row in table.to_pylist()}
            stored_captions(config).write(keys, {key: rows[key] for key in keys})
            (done,) = (path := tmp_path / name).glob("distilled/*/*.parquet")
            before = done.stat().st_mtime_ns
        caption_training_images(config, dataset, None)
        found[name] = tables(config)
    assert done.stat().st_mtime_ns == before, path
    assert len(found["one"]) == 3
    for name in ("three", "resumed"):
        assert found[name].keys() == found["one"].keys(), name
        assert all(found[name][chunk].equals(found["one"][chunk]) for chunk in found["one"]), name
    captions = [text for table in found["one"].values() for texts in table["captions"].to_pylist() for text in texts]
    assert len(captions) == 3 * 48, "all captions of the beam"
    assert len({text for text in captions if text}) > 5, "the teacher's captions differ"


@pytest.mark.ray
def test_a_teacher_of_regions_captions_regions(tmp_path: Path, ray_session: None) -> None:
    changes: dict[str, Any] = {
        "model": SMALL_MODEL | {"name": "transformer"},
        "data__synthetic": SCENES | {"num_images": 60},
    }
    settings = student(tmp_path / "storage", tmp_path / "teacher", **changes)
    del settings["backbone"]
    settings["features"] = {"hdf5": "synthetic", "max_regions": 4}
    make_teacher(tmp_path / "teacher", settings | {"distill": None, "storage": str(tmp_path / "teacher-runs")})
    config = parse_config(settings)
    dataset, _ = find_data(config)
    caption_training_images(config, dataset, None)
    (table,) = tables(config).values()
    assert sorted(table["key"].to_pylist()) == sorted(dataset.split("train").column("key"))
    assert table["key"][0].as_py().startswith("id-")
    assert any(text for texts in table["captions"].to_pylist() for text in texts)


@pytest.mark.ray
def test_images_that_cannot_be_decoded_have_no_captions(
    tmp_path: Path, ray_session: None, log_lines: list[str]
) -> None:
    root = write_karpathy(tmp_path / "set", {"train": 12, "val": 2, "test": 2}, size=32)
    data = {"root": str(root), "train_splits": ["train"], "min_count": 1, "max_bad_fraction": 0.2}
    data |= {"test_splits": ["test"]}
    bundle = make_teacher(tmp_path / "teacher", small_config(tmp_path / "teacher-runs", data=data))
    (root / "images" / "3.png").write_bytes(b"no image")
    config = parse_config(student(tmp_path / "storage", bundle, data=data))
    dataset, unreadable = find_data(config)
    assert not unreadable
    caption_training_images(config, dataset, None)
    keys = {key for table in tables(config).values() for key in table["key"].to_pylist()}
    train_keys = dict(zip(*map(dataset.split("train").column, ("image_id", "key")), strict=True))
    assert keys == set(train_keys.values()) - {train_keys[103]} and len(keys) == 11
    assert any("1 images have no captions of the teacher; the first is 103:" in line for line in log_lines)
    log_lines.clear()
    caption_training_images(config, dataset, None)
    assert any("11 of 12 images there, 1 to caption" in line for line in log_lines), "it is tried again"

    teacher, store, every = find_teacher(config), stored_captions(config), np.ones(12, bool)
    assert teacher is not None
    chunks = store.divide(images_to_caption(config, dataset), ~every, every)
    arguments = bundle_source(teacher.location, config), chunks, store, teacher.config_of(config), None
    assert caption_to_store(*arguments) == {103: NOT_READ}, "a repeated task finds its chunk, and names the image"


@pytest.mark.ray
def test_the_trials_of_a_search_learn_captions_that_are_computed_once(
    tmp_path: Path, ray_session: None, log_lines: list[str]
) -> None:
    bundle = make_teacher(tmp_path / "teacher", small_config(tmp_path / "teacher-runs"))
    changes = {"set": {"distill": {"model": str(bundle)}}, "trial": {"epochs": 0.5}, "budget": {"trials": 2}}
    assert main(["tune", str(write_search(tmp_path, **changes))]) == 0
    assert sum("0 of 48 images there, 48 to caption" in line for line in log_lines) == 1
    records = [json.loads(path.read_text())["distilled"] for path in tmp_path.glob("storage/runs/*/run.json")]
    assert len(records) >= 2 and all(record == records[0] and record["captions"] for record in records)
