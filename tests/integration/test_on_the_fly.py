"""Frozen stages that compute the features of training images at each step: the weights are those with a store."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.jobs.cli import main
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import decode_batch
from raycap.pipeline.features.extraction import Extractor, ShardWriter, with_views
from raycap.pipeline.features.store import FeatureStore, feature_key
from raycap.pipeline.runs.folder import RunFolder, open_folder
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import (
    FROZEN_STAGES,
    STAGES,
    Killed,
    assert_same_weights,
    best_weights,
    break_each_stage_once,
    run_ranks,
    write_config,
)

GROUPS = (STAGES[:2], STAGES[2:3])  # frozen and trained; frozen with another backbone


def prepare_run(storage: Path, **features: Any) -> RunFolder:
    """A run whose batches fill no batch of the extraction."""
    stages = [stage | {"batch_size": 7, "checkpoint_every_steps": 1} for stage in small_config(storage)["stages"]]
    settings = {"batch_size": 5, "compute_dtype": "float32"} | features
    return prepare(parse_config(small_config(storage, stages=stages, features=settings)))


def extract(folder: RunFolder, stage: str) -> StoragePath:
    """The features that a stage reads, computed and written by an extraction's actor in this process."""
    config, data = folder.config, folder.config.data
    weights = folder.weights_before(config.stage(stage), "backbone")
    extractor = Extractor(config.backbone, weights, config.features, data.max_pixels)
    store = config.storage_place / "features" / feature_key(extractor.describe())
    stored = data.train_splits if folder.config.features.store == "always" else ()
    rows: Dataset = with_views(folder.dataset.split(*stored, data.val_split), config)
    batch = {name: rows.table[name].to_numpy() for name in ("key", "uri")}
    pixels = decode_batch(batch, extractor.transform, data.max_pixels, augmentation=config.features.augmentation)
    assert (ShardWriter(store, extractor)(pixels)["reason"] == "").all()
    assert len(FeatureStore(store)) == len(rows)
    return store


def train(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Trains the stages of GROUPS and returns their best weights."""
    for stages in GROUPS:
        train_stages(LocalContext("cpu"), StageJob(folder, stages, extract(folder, stages[0])))
    return {f"{stage}/{name}": value for stages in GROUPS for stage in stages for name, value in weights(folder, stage)}


def weights(folder: RunFolder, stage: str) -> list[tuple[str, torch.Tensor]]:
    return list(best_weights(folder.stage(stage)).items())


@pytest.mark.parametrize(
    "features",
    [
        {"views": 2},
        pytest.param({}, marks=pytest.mark.proof),
        pytest.param({"compute_dtype": "bfloat16", "stored_dtype": "float32"}, marks=pytest.mark.proof),
    ],
)
def test_the_weights_are_bit_identical_also_after_a_kill(
    tmp_path: Path, features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCST follows a stage that trains the backbone. Each stage is broken off once."""
    stored, on_the_fly = (prepare_run(tmp_path / store, store=store, **features) for store in ("always", "never"))
    expected = train(stored)
    broken = break_each_stage_once(monkeypatch, 2)
    for _ in range(len(STAGES[:3])):
        with pytest.raises(Killed):
            train(on_the_fly)
    assert_same_weights(train(on_the_fly), expected)
    assert broken == {*STAGES[:3]}


def one_rank(rank: int, folders: list[Path], stores: list[StoragePath], out: Path) -> None:
    """One of two processes that train the first stage of both runs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    context = LocalContext("cpu")
    context.world_rank, context.world_size = rank, 2
    for folder, store in zip(folders, stores, strict=True):
        train_stages(context, StageJob(open_folder(folder), FROZEN_STAGES[:1], store))
    gc.collect()  # the stages' reducers, which otherwise keep the group's threads until the interpreter has ended
    dist.destroy_process_group()


def test_two_workers_compute_the_features_of_a_store(tmp_path: Path) -> None:
    folders = [prepare_run(tmp_path / store, store=store) for store in ("always", "never")]
    stores = [extract(folder, FROZEN_STAGES[0]) for folder in folders]
    run_ranks(one_rank, 2, [folder.path for folder in folders], stores, tmp_path)
    ours, expected = (best_weights(folder.stage(FROZEN_STAGES[0])) for folder in reversed(folders))
    assert_same_weights(ours, expected)


def test_an_image_that_cannot_be_decoded_ends_training_with_its_name(tmp_path: Path) -> None:
    folder = prepare_run(tmp_path, store="never")
    store, images = extract(folder, FROZEN_STAGES[0]), folder.dataset.split("train").column("uri")
    for uri in images[::2]:
        Path(uri).write_bytes(b"no image")
    names = "|".join(images[::2])
    pattern = rf"^training cannot use the image ({names}): not an image in a known format; take it out"
    with pytest.raises(ValueError, match=pattern):
        train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES[:1], store))


@pytest.mark.proof
@pytest.mark.ray
def test_a_run_keeps_no_features_of_training_images(tmp_path: Path, ray_session: None, log_lines: list[str]) -> None:
    """This also holds if there are so many new images that an extraction would read them."""
    values = small_config(tmp_path / "results", features={"store": "never", "max_images_for_tasks": 0})
    file = str(write_config(tmp_path / "run.yaml", values))
    assert main(["extract", file, "--verify"]) == 0
    assert any("features     of training images are computed during training" in line for line in log_lines)
    assert main(["run", file]) == 0
    (run,) = (tmp_path / "results" / "runs").iterdir()
    folder = open_folder(run)
    assert folder.summary is not None
    training = folder.dataset.split(*folder.config.data.train_splits).table["key"]
    stores = [FeatureStore(place) for place in (tmp_path / "results" / "features").iterdir()]
    assert len(stores) >= 2, "of the initial backbone, and of the trained one"
    for store in stores:
        assert len(store) and not store.contains(training).any()
