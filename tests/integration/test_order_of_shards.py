"""Frozen stages that read whole shards: broken off, continued by another number of workers, with a cache of half."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from raycap.pipeline.features.store.index import read_manifests
from raycap.pipeline.features.store.shards import _Shard
from raycap.pipeline.features.store.store import FeatureStore, write_shard
from raycap.pipeline.runs.folder import RunFolder, open_folder
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.cache import REWARD_INDEXES, ShardCache, used_bytes
from raycap.pipeline.storage.path import StoragePath, cache_folder
from raycap.pipeline.training.batches import Batches
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from raycap.pipeline.training.rewards.stage_reward import StageReward
from tests.conftest import small_config
from tests.support.features import gather
from tests.support.runs import FROZEN_STAGES, Killed, assert_same_weights, best_weights, prepare_run

ROWS = 3  # per shard


def prepare_many_shards(storage: Path | dict[str, Any], **features: Any) -> tuple[RunFolder, StoragePath]:
    """A run of two frozen stages of two epochs, and its features in shards of ROWS images.

    Document frequencies of SCST are those of ten images, so that its reward has groups of images.
    """
    stages = [stage for stage in small_config(Path())["stages"] if stage["name"] in FROZEN_STAGES]
    stages = [stage | {"epochs": 2, "batch_size": 7, "checkpoint_every_steps": 1} for stage in stages]
    stages[1]["scst"] = stages[1].get("scst", {}) | {"document_sample": 10}
    settings = {"order": "shards", "shuffle_buffer": 0.3, "compute_dtype": "float32"} | features
    folder, store = prepare_run(storage, stages=stages, features=settings)
    whole, cut = FeatureStore(store), store / "cut"
    keys = pa.concat_tables(read_manifests(store))["key"].to_pylist()
    for first in range(0, len(keys), ROWS):
        write_shard(cut, keys[first : first + ROWS], gather(whole, keys[first : first + ROWS]))
    return folder, cut


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The reward has one group of images per epoch."""
    folder, store = prepare_many_shards(tmp_path_factory.mktemp("undisturbed"))
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    return folder


@pytest.mark.parametrize("stop", [1, 6, 12])
def test_interrupted_anywhere_the_weights_are_bit_identical(
    tmp_path: Path, undisturbed: RunFolder, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off near the beginning, at the end of the first epoch, and in the second one.

    The reward has groups of four steps, whose scores are those of larger groups. No index of a group is in the cache.
    """
    cached = sorted((cache_folder() / REWARD_INDEXES).glob("*"))
    monkeypatch.setattr("raycap.pipeline.training.loop.GROUP_IMAGES", 28)
    folder, store = prepare_many_shards(tmp_path)
    original, broken = StageRun.step, set()

    def step(self: StageRun, number: int, batches: Any) -> Any:
        if number == stop and self.stage.name not in broken:
            broken.add(self.stage.name)
            self.output.wait()
            raise Killed
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)
    for _ in range(3):
        try:
            train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
        except Killed:
            continue
    assert broken == set(FROZEN_STAGES)
    for stage in FROZEN_STAGES:
        assert_same_weights(best_weights(folder.stage(stage)), best_weights(undisturbed.stage(stage)))
    assert sorted((cache_folder() / REWARD_INDEXES).glob("*")) == cached


def test_groups_end_with_their_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last group has no images of later steps. A stage that only lacks its result has no group at all."""
    monkeypatch.setattr("raycap.pipeline.training.loop.GROUP_IMAGES", 35)  # five steps, of a stage of 14
    folder, store = prepare_many_shards(tmp_path)
    original, finish = Batches.images_of, StageRun._finish
    last_steps = list[int]()

    def images_of(self: Batches, start: int, stop: int) -> Any:
        last_steps.append(stop)
        return original(self, start, stop)

    def unfinished(self: StageRun) -> None:
        if self.reward is not None:
            raise Killed
        finish(self)

    def refuse(*_: object) -> None:
        raise AssertionError("a group is built")

    monkeypatch.setattr(Batches, "images_of", images_of)
    monkeypatch.setattr(StageRun, "_finish", unfinished)
    job = StageJob(folder, FROZEN_STAGES, store)
    with pytest.raises(Killed):
        train_stages(LocalContext("cpu"), job)
    assert last_steps == [5, 10, 14]
    monkeypatch.setattr(StageRun, "_finish", finish)
    monkeypatch.setattr(StageReward, "begin", refuse)
    train_stages(LocalContext("cpu"), job)
    assert folder.result(FROZEN_STAGES[1]) is not None


class WorkerContext(LocalContext):
    """One of several workers, which must stop after `steps` steps."""

    def __init__(self, rank: int, world_size: int, steps: int) -> None:
        super().__init__("cpu")
        self.world_rank, self.world_size, self.left = rank, world_size, steps

    def must_stop(self) -> bool:
        self.left -= 1
        return self.left <= 0


def one_rank(rank: int, world_size: int, folder: Path, store: StoragePath, steps: int, out: Path) -> None:
    """One of several processes that train a part of the first stage, and save a checkpoint."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous-{steps}", rank=rank, world_size=world_size)
    job = StageJob(open_folder(folder), FROZEN_STAGES[:1], store)
    train_stages(WorkerContext(rank, world_size, steps), job)
    gc.collect()  # the stages' reducers, which otherwise keep the group's threads until the interpreter has ended
    dist.destroy_process_group()


def test_another_number_of_workers_finishes_an_epoch_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes train three steps of an epoch, two more one, and one process the rest in the order of the two."""
    folder, store = prepare_many_shards(tmp_path)
    for steps in (3, 1):
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            one_rank, (2, folder.path, store, steps, tmp_path), nprocs=2
        )
    stage, seen, original = folder.config.stages[0], dict[int, list[int]](), StageRun.step

    def step(self: StageRun, number: int, batches: Any) -> Any:
        seen[number] = [image for batch in batches for image in batch.images.tolist()]
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES[:1], store))
    run = StageRun(LocalContext("cpu"), folder, stage, StageJob(folder, FROZEN_STAGES[:1], store))

    def images(world_size: int, step: int) -> list[int]:
        inputs, captions, seed = run.batches.images, run.batches.captions, run.batches.seed
        workers = [
            Batches(inputs, captions, stage, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for worker in workers:
            worker.order_by_shards(0.3)
        return [image for worker in workers for batch in worker.at(step) for image in batch.images.tolist()]

    first, last = min(seen), max(seen)
    ends = run.batches.num_samples / stage.batch_size  # the first epoch, in steps
    assert first == 4 < int(ends) and ends % 1, "the first epoch is in progress, and ends within a step"
    for number in range(first, int(ends)):
        assert seen[number] == images(2, number) != images(1, number)
    for number in range(int(ends) + 1, last + 1):
        assert seen[number] == images(1, number) != images(2, number)


def test_with_a_cache_of_half_the_store_no_row_of_training_is_read_alone(
    tmp_path: Path, undisturbed: RunFolder, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features are on S3. The weights are those of a run on local storage, and the cache keeps its limit."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    folder, store = prepare_many_shards({"uri": "s3://data/order-of-shards", "endpoint_url": s3})
    sizes = sum(entry.size for entry in (store / "shards").list().values())
    train = folder.dataset.split("train").column("key")
    settings = folder.config.features.model_copy(update={"cache_gib": sizes / 2 / 2**30})
    folder.__dict__["config"] = folder.config.model_copy(update={"features": settings})
    alone, most, row, add = list[str](), list[int](), _Shard.row, ShardCache._add

    def counted(self: _Shard, number: int) -> np.ndarray:
        if self.map is None:
            alone.append(f"{Path(self.path.name).stem}/{number}")
        return row(self, number)

    def added(self: ShardCache, path: Path, data: bytes) -> bool:
        result = add(self, path, data)
        most.append(used_bytes([self.folder]))
        return result

    monkeypatch.setattr(_Shard, "row", counted)
    monkeypatch.setattr(ShardCache, "_add", added)
    monkeypatch.setattr(RunFolder, "on_worker", lambda self, token=None: self)
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    for stage in FROZEN_STAGES:
        assert_same_weights(best_weights(folder.stage(stage)), best_weights(undisturbed.stage(stage)))
    opened = FeatureStore(store)
    positions = opened.locate(folder.dataset.split("train").table["key"])
    of_train = {f"{opened.shards[opened._rows.shard[at]].shard}/{opened._rows.row[at]}" for at in positions}
    assert len(of_train) == len(train) and not of_train & set(alone)
    assert most and max(most) <= sizes / 2 and used_bytes([cache_folder() / "shards"]) > sizes / 4
