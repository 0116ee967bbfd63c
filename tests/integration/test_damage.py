"""Damaged runs and stores: each damage is named, and stepped over or repaired where that is possible."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runs.folder import RunFolder, StageResult, stored_config
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.loop import StageJob, StageRun, stage_captioner, train_stages
from raycap.pipeline.training.optimizer import make_optimizer
from raycap.pipeline.training.stage_output import Progress, StageOutput
from tests.conftest import small_config
from tests.support.damage import cut, empty, flip, flip_any, replace_by_garbage
from tests.support.runs import Killed, assert_same_weights, best_weights, prepare_run

STAGE = "xe_frozen"


class World(NamedTuple):
    """A run with two checkpoints of a stage that was killed, its features, and the weights of one that was not."""

    folder: RunFolder
    store: StoragePath
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Every validation is better than those before, so that each checkpoint refers to best weights of its own."""
    root = tmp_path_factory.mktemp("world")
    stage = small_config(root)["stages"][0] | {"validate_every_epochs": 0.2}
    folder, store = prepare_run(root, stages=[stage])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRun, "_score", lambda self, _: float(self.progress.step))
        whole = copied(folder, root / "whole")
        train_stages(LocalContext("cpu"), StageJob(whole, (STAGE,), store))
        run = StageRun(LocalContext("cpu"), folder, folder.config.stages[0], StageJob(folder, (STAGE,), store))
        step, last = run.step, run.total - 1

        def killed(number: int, batches: list[Batch]) -> dict[str, float]:
            if number == last:
                run.output.wait()
                raise Killed
            return step(number, batches)

        patch.setattr(run, "step", killed)
        with pytest.raises(Killed):
            run.run()
        assert len(list(folder.stage(STAGE).glob("step-*"))) == len(list(folder.stage(STAGE).glob("best-*"))) == 2
        yield World(folder, store, best_weights(whole.stage(STAGE)))


def copied(folder: RunFolder, root: Path) -> RunFolder:
    """A copy of a run's folder."""
    return replace(folder, path=Path(shutil.copytree(folder.path, root / "runs" / folder.run_id)))


def newest(stage: Path, prefix: str) -> Path:
    return max(stage.glob(f"{prefix}-*"), key=lambda path: int(path.name.split("-")[1]))


def train(folder: RunFolder, world: World) -> list[str]:
    """Trains the stage to its end, and returns the texts that the driver prints."""
    train_stages(LocalContext("cpu"), StageJob(folder, (STAGE,), world.store))
    assert_same_weights(best_weights(folder.stage(STAGE)), world.weights)
    return [entry["text"] for entry in read_journal(folder.journal) if "text" in entry]


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("step/state.pt", flip_any),
        ("step/progress.json", empty),
        ("step/digests.json", Path.unlink),
        ("best/model.safetensors", cut),
    ],
)
def test_a_damaged_checkpoint_is_stepped_over(tmp_path: Path, world: World, name: str, damage: Damage) -> None:
    folder = copied(world.folder, tmp_path)
    stage, (prefix, file) = folder.stage(STAGE), name.split("/")
    older, _ = sorted(int(path.name.split("-")[1]) for path in stage.glob("step-*"))
    path = newest(stage, prefix) / file
    damage(path)
    progress, (notice,) = resumed(folder)
    assert progress.step == progress.best_step == older
    assert notice.startswith(str(path)) and notice.endswith("; the stage resumes from an earlier state")


def resumed(folder: RunFolder) -> tuple[Progress, list[str]]:
    """The progress of the stage with which a worker begins, and the damages that it has found."""
    output, section = StageOutput(folder, STAGE, writes=False), folder.config.stages[0]
    captioner = stage_captioner(folder, section, torch.device("cpu"))
    optimizer = make_optimizer(captioner, section.optimizer, section.lr)
    return output.restore(output.newest_whole(captioner), captioner, optimizer), output.damages


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_a_stage_with_damaged_checkpoints_ends_with_the_same_weights(
    tmp_path: Path, world: World, num_damaged: int
) -> None:
    """From the older checkpoint, or from the beginning. Folders of others remain."""
    folder = copied(world.folder, tmp_path)
    stage, others = folder.stage(STAGE), {"step-backup", "step-", "step-9x", "step-999"}
    older, last = sorted(int(path.name.split("-")[1]) for path in stage.glob("step-*"))
    for name in others:
        (stage / name).write_text("a file") if name == "step-999" else (stage / name).mkdir()
    for step in (last, older)[:num_damaged]:
        cut(stage / f"step-{step}" / "state.pt")
    texts = train(folder, world)
    assert sum("resumes from an earlier state" in text for text in texts) == num_damaged
    begin = "starts at step 0 of" if num_damaged == 2 else f"continues from step {older} of"
    assert any(text.startswith(begin) for text in texts)
    assert {path.name for path in stage.glob("step-*")} == others


@pytest.mark.parametrize("damage", [cut, replace_by_garbage])
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "vocabulary.json", f"stages/{STAGE}/DONE.json"])
def test_a_damaged_document_is_named_with_a_remedy(tmp_path: Path, world: World, name: str, damage: Damage) -> None:
    folder = copied(world.folder, tmp_path)
    path = folder.path / name
    if not path.exists():
        path.write_text('{"steps": 4, "best_step": 4, "best_score": 4.0, "kept": true, "ended_early": ""}')
    if (path.suffix, damage) == (".yaml", cut):  # between two lines it would leave a valid document
        path.write_text(path.read_text() + "stages: [")
    else:
        damage(path)
    with pytest.raises(DamagedError) as raised:
        _ = (stored_config(folder.path), folder.metadata, folder.vocabulary, folder.result(STAGE))
    assert str(raised.value).startswith(str(path)) and "restore it from a copy, or remove " in str(raised.value)


@pytest.mark.parametrize("damage", [flip_any, Path.unlink])
@pytest.mark.parametrize("part", ["best", "init"])
def test_damaged_weights_are_named_with_a_remedy(tmp_path: Path, world: World, part: str, damage: Damage) -> None:
    folder = copied(world.folder, tmp_path)
    path = folder.path / "init" / "model.safetensors"
    if part == "best":
        path = newest(folder.stage(STAGE), "best") / "model.safetensors"
        step = int(path.parent.name.split("-")[1])
        result = StageResult(steps=step, best_step=step, best_score=1.0, kept=True, ended_early="")
        write_json(folder.stage(STAGE) / "DONE.json", asdict(result))
    damage(path)
    with pytest.raises(DamagedError) as raised:
        folder.delivered_weights("model")
    assert str(raised.value).startswith(str(path)) and "restore it from a copy, or remove " in str(raised.value)


def flip_caption(path: Path) -> None:
    """Changes a letter of a caption, which leaves a valid table."""
    data = path.read_bytes()
    place = data.index(b" a ")
    path.write_bytes(data[: place + 1] + b"b" + data[place + 2 :])


@pytest.mark.parametrize("damage", [cut, flip_caption])
def test_damaged_data_are_written_again(world: World, damage: Damage, log_lines: list[str]) -> None:
    before, path = world.folder.dataset.table.to_pylist(), world.folder.path / "data.arrow"
    Path(shutil.copy(path, path.with_suffix(".new"))).replace(path)  # other tests have mapped the file
    damage(path)
    folder = prepare(world.folder.config)
    assert folder.path == world.folder.path and folder.dataset.table.to_pylist() == before


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, world: World) -> None:
    """A checkpoint that does not fit raises OSError and leaves nothing behind; the stage continues later."""
    folder = copied(world.folder, tmp_path)
    run = StageRun(LocalContext("cpu"), folder, folder.config.stages[0], StageJob(folder, (STAGE,), world.store))
    before = sorted(path.name for path in folder.stage(STAGE).iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        for save in (
            lambda: run.output.save_checkpoint(run.captioner, run.optimizer, run.progress),
            lambda: run.output.save_best(run.captioner, 99, {}),
        ):
            with pytest.raises(OSError, match="File too large"):
                save()
                run.output.wait()
            run.output._pending = None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in folder.stage(STAGE).iterdir()) == before
    train(folder, world)


def test_every_flipped_bit_is_found(tmp_path: Path, world: World) -> None:
    """At first use: in a checkpoint, best weights and a shard."""
    folder = copied(world.folder, tmp_path)
    stage = folder.stage(STAGE)

    def stage_damage() -> str:
        return " ".join(resumed(folder)[1])

    def store_damage() -> str:
        return " ".join(FeatureStore(world.store).verify())

    (shard,) = world.store.path.glob("shards/*.npy")
    checks: dict[Path, Callable[[], str]] = {
        newest(stage, "step") / "state.pt": stage_damage,
        newest(stage, "best") / "model.safetensors": stage_damage,
        shard: store_damage,
    }
    assert not any(first_use() for first_use in checks.values())
    rng = random.Random(0)
    for number in range(20):
        path = list(checks)[number % len(checks)]
        whole = path.read_bytes()
        flip(path, rng)
        assert str(path) in checks[path]()
        path.write_bytes(whole)
