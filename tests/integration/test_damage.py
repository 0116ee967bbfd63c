"""Damaged runs: each damage is named with a remedy, or repaired."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.runs.folder import RunFolder, stored_config
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.training.batches import Batch
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config
from tests.support.damage import cut, empty, replace_by_garbage
from tests.support.runs import Killed, assert_same_weights, best_weights, prepare_run

STAGE = "xe_frozen"


class World(NamedTuple):
    """A run with two checkpoints of a stage that was killed, its features, and the weights of one that was not."""

    folder: RunFolder
    store: StoragePath
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Every validation is better than the ones before. Therefore each checkpoint refers to best weights of its own."""
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


def train(folder: RunFolder, world: World) -> None:
    """Trains the stage to its end, which gives the weights of the undisturbed run."""
    train_stages(LocalContext("cpu"), StageJob(folder, (STAGE,), world.store))
    assert_same_weights(best_weights(folder.stage(STAGE)), world.weights)


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(("name", "damage"), [("state.pt", cut), ("progress.json", empty), ("state.pt", Path.unlink)])
def test_the_remedy_of_a_damaged_checkpoint_gives_the_same_weights(
    tmp_path: Path, world: World, name: str, damage: Damage
) -> None:
    folder = copied(world.folder, tmp_path)
    checkpoint = max(folder.stage(STAGE).glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    damage(checkpoint / name)
    with pytest.raises(DamagedError, match=f"{checkpoint} cannot be read: .*; remove {checkpoint}, and the same"):
        train(folder, world)
    shutil.rmtree(checkpoint)
    train(folder, world)


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
    assert str(raised.value).startswith(str(path)) and "; re" in str(raised.value), "with a remedy"


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
