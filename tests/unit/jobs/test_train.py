"""Training on Ray: how often it may fail, and what a failure's message says."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from raycap.jobs import train
from raycap.jobs.train import FailureBudget, fit
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.training.loop import StageJob
from tests.support.runs import empty_run

MINUTE, DAY = 60, 24 * 3600


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_hundred_lost_nodes_in_a_week_are_no_reason_to_stop() -> None:
    clock = Clock()
    budget = FailureBudget(3, clock)
    for number in range(100):
        clock.now = number * 7 * DAY / 100
        budget.charge("worker 1 died")


@pytest.mark.parametrize(("per_hour", "last"), [(0, 1), (3, 4)])
def test_a_failure_that_repeats_every_minute_ends_training(per_hour: int, last: int, log_lines: list[str]) -> None:
    clock = Clock()
    budget = FailureBudget(per_hour, clock)
    for _ in range(last - 1):
        budget.charge("worker 1 died")
        clock.now += MINUTE
    with pytest.raises(JobFailedError, match=f"worker 1 died .failure {last} within an hour"):
        budget.charge("worker 1 died")
    assert len(log_lines) == per_hour, "each failure that is followed by an attempt is reported"


def fit_with(monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None], can_start: bool = True) -> list[str]:
    """Runs `fit` with attempts that raise these errors, or end (None). Returns the order of calls."""
    calls: list[str] = []

    def attempt(*_: object) -> None:
        calls.append("attempt")
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(train, "_attempt", attempt)
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("leave"))
    config = SimpleNamespace(workers=SimpleNamespace(max_failures_per_hour=2))
    job = SimpleNamespace(folder=SimpleNamespace(config=config))
    fit(cast(StageJob, job), (lambda: calls.append("wait")) if can_start else None)
    return calls


def lost(rank: int) -> WorkerGroupError:
    """Ray Train's error when the worker of a rank died and rank 0 lost its peer."""
    died = WorkerHealthCheckFailedError("A worker health check failed.", ActorDiedError())
    return WorkerGroupError("text", {0: RuntimeError("connection closed by peer"), rank: died})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lost(2), "worker 2 died: "),
        (WorkerGroupError("text", {1: KeyError("x")}), "worker 1 failed: KeyError: 'x'"),
        (ControllerError(RuntimeError("a node died\nmore")), "the workers did not start: RuntimeError: a node died"),
        (
            WorkerGroupError("text", {0: RuntimeError("CUDA out of memory.\nmore")}),
            "worker 0 failed: RuntimeError: CUDA out of memory.; raise the stage's gradient_accumulation_steps, or set "
            "backbone.gradient_checkpointing to true; training",
        ),
        (ActorDiedError(), "Ray Train's controller died"),
    ],
)
def test_each_kind_of_failure_is_named_and_training_resumes(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    leaves = ["leave"] if isinstance(error, ActorDiedError) else []
    assert fit_with(monkeypatch, [error, None]) == ["attempt", *leaves, "wait", "attempt"]
    (line,) = log_lines
    assert line.startswith(reason)
    assert line.endswith("; training resumes from the last checkpoint (failure 1 within an hour, at most 2)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_ends_training_with_a_sentence(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt would fill the disk again. Other errors of the disk may pass, so that another attempt follows."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "state.pt")

    monkeypatch.setattr(train, "train_stages", fail)
    monkeypatch.setattr("raycap.jobs.train.RayContext", lambda *_: None)
    job = StageJob(empty_run(tmp_path), ("xe",), None, driver_token="t")
    with pytest.raises(OSError):
        train._run_worker(job)
    file = train.failure_file(job)
    if number == errno.EIO:
        assert not file.exists()
    else:
        reason = f"{tmp_path} cannot be written ({os.strerror(number)}); free space, and the same command continues"
        assert file.read_bytes().decode().startswith(reason)
