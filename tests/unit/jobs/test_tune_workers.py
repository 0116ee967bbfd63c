"""A trial with several workers: the validations that it reports, and a storage that fails meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycap.jobs.tune import workers as module
from raycap.jobs.tune.workers import train_on_workers
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.storage.s3 import OutageError


class Folder:
    """A run on S3 whose first downloads fail."""

    def __init__(self, journal: Path, num_failures: int) -> None:
        self.journal, self.num_failures, self.pulled = journal, num_failures, list[str]()

    def pull(self, under: str) -> None:
        self.pulled.append(under)
        if len(self.pulled) <= self.num_failures:
            raise OutageError("s3://bucket/run: storage failed for 600 s")


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(module, "JOURNAL_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "JOURNAL_EVERY_S", 0.0)
    (tmp_path / "metrics").mkdir()
    return Folder(tmp_path / "metrics", 3)


def test_a_trial_outlasts_downloads_that_fail(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []

    def fit(*_: Any) -> None:
        wait_for(lambda: len(folder.pulled) > folder.num_failures)
        entry = {"stage": "a", "kind": "validation", "step": 7, "time": 0.0}
        (folder.journal / "00001.jsonl").write_text(json.dumps(entry) + "\n")
        wait_for(lambda: bool(reports))

    monkeypatch.setattr(module, "fit", fit)
    job, context = SimpleNamespace(folder=folder), SimpleNamespace(report=reports.append)
    train_on_workers(job, context)  # type: ignore[arg-type]
    assert reports == [{"stage": "a", "step": 7}] and folder.pulled[-3:] == ["stages", "predictions", JOURNAL]


def test_an_outage_keeps_its_type(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the trial is repeated. Other errors become one line."""
    error: Exception = OutageError("s3://bucket/run: storage failed for 600 s")

    def fit(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "fit", fit)
    job: Any = SimpleNamespace(folder=folder)
    context: Any = SimpleNamespace()
    with pytest.raises(OutageError):
        train_on_workers(job, context)
    error = KeyError("a\nb")
    with pytest.raises(RuntimeError, match="a.*b"):
        train_on_workers(job, context)
