"""What ends or slows a stage: patience, the switch to the next stage, a plateau, the decay between epochs; signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raycap.jobs.cli import main
from raycap.pipeline.runs.folder import JOURNAL, open_folder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.tracking.run_tracker import Tracker
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config
from tests.support.logs import on_message
from tests.support.runs import (
    FROZEN_STAGES,
    MESHED_MEMORY,
    assert_same_weights,
    best_weights,
    prepare_region_run,
    prepare_run,
    write_config,
)


def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: list[float], first: dict[str, Any], second: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """Trains two stages of 8 epochs. Returns the run and its journal.

    scores: of the validations, of which there is one in each epoch."""
    stages = [stage for stage in small_config(tmp_path)["stages"] if not stage.get("train_backbone")]
    for stage, settings in zip(stages, (first, second), strict=True):
        stage |= {"epochs": 8, "batch_size": 16, "validate_every_epochs": 1, "lr": 1e-3}
        stage |= {"schedule": {"name": "hyperbolic"}} | settings
    folder, store = prepare_region_run(tmp_path, MESHED_MEMORY, stages=stages)
    given = iter(scores)
    monkeypatch.setattr("raycap.pipeline.training.loop.caption_images", lambda *_: {})  # nobody looks at them
    monkeypatch.setattr(StageRun, "_score", lambda self, captions: next(given))
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    assert next(given, None) is None, "as many validations as expected"
    return folder, read_journal(folder.journal)


def test_patience_ends_a_stage_and_the_next_begins_from_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross entropy ends after two validations in a row below the best. In SCST a better one restarts the count."""
    scores = [1.0, 3.0, 2.9, 2.8, *(3.0, 3.1, 3.0, 3.2, 3.1, 3.1)]
    started: list[dict[str, torch.Tensor]] = []
    original = StageRun.run

    def run(self: StageRun) -> bool:
        started.append({name: tensor.clone() for name, tensor in self.captioner.model.state_dict().items()})
        return original(self)

    monkeypatch.setattr(StageRun, "run", run)
    folder, _ = trained(tmp_path, monkeypatch, scores, {"patience": 2}, {"patience": 2})
    first, second = folder.result("xe_frozen"), folder.result("scst_frozen")
    epoch = 48 / 16
    assert (first.steps, first.best_step, first.best_score) == (4 * epoch, 2 * epoch, 3.0)
    assert first.ended_early == "no better validation 2 times in a row"
    assert (second.steps, second.best_step) == (6 * epoch, 4 * epoch)
    best = load_file(folder.stage("xe_frozen") / f"best-{first.best_step}" / "model.safetensors")
    assert all(torch.equal(started[1][name], tensor) for name, tensor in best.items())


def test_a_plateau_lowers_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two validations in a row that did not beat the best, the rate is halved, besides the schedule's decay."""
    decay = {"schedule": {"name": "hyperbolic", "decay": 0.8, "decay_every_epochs": 5}}
    plateau = {"plateau": {"factor": 0.5, "patience": 2}}
    falls = [3.0, 2.9, 2.9, 2.8, 3.1, 3.0, 2.9, 2.9]
    _, journal = trained(tmp_path, monkeypatch, [1.0] * 8 + falls, decay, plateau)
    rates: dict[str, list[float]] = {}
    for entry in journal:
        if entry["kind"] == "train" and entry["step"] % 3 == 0:  # the last step of each epoch
            rates.setdefault(entry["stage"], []).append(entry["lr"] / 1e-3)
    assert rates["xe_frozen"] == pytest.approx([1.0] * 5 + [0.8] * 3)
    assert rates["scst_frozen"] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1, threshold=0.0)
    for rate, score in zip(rates["scst_frozen"], falls, strict=True):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate), "torch's patience is one less"
        scheduler.step(score)


@pytest.mark.ray
def test_a_signal_during_training_saves_a_checkpoint(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGTERM the stage is continued, and its weights are those of an undisturbed run."""
    statuses: list[str | None] = []
    monkeypatch.setattr(Tracker, "close", lambda self, status: statuses.append(status))
    # Ray Data warns of its own deprecated options when it is imported, which another test may have done
    monkeypatch.setattr("warnings.showwarning", lambda *_, **__: None)
    stage = small_config(tmp_path)["stages"][1] | {"epochs": 20, "validate_every_epochs": 10}
    stage |= {"checkpoint_every_steps": 10**6}
    settings = {"stages": [stage], "workers__dry_run": False}
    config = write_config(tmp_path / "run.yaml", small_config(tmp_path / "stopped", **settings))
    assert run_and_signal(config, signal.SIGTERM, after=3) == 143
    assert capsys.readouterr().err == "raycap: stopped; run the same command again to continue\n"
    (checkpoint,) = tmp_path.glob("stopped/runs/*/stages/xe_finetune/step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert statuses == ["KILLED"] and step > 0
    (run,) = tmp_path.glob("stopped/runs/*")
    whole, _ = prepare_run(tmp_path / "whole", **settings)
    for folder in (open_folder(run), whole):
        train_stages(LocalContext("cpu"), StageJob(folder, ("xe_finetune",), None))
    assert f"continues from step {step} " in str(read_journal(run / JOURNAL))
    assert_same_weights(best_weights(run / "stages/xe_finetune"), best_weights(whole.stage("xe_finetune")))


def run_and_signal(config: Path, number: signal.Signals, after: int) -> int:
    """The exit code of `raycap run` in this process, which gets the signal after `after` logged steps."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}

    def send(message: str) -> None:
        nonlocal after
        after -= "loss" in message
        if after == 0:
            os.kill(os.getpid(), number)

    try:
        with on_message(send):
            return main(["run", str(config)])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
