"""The end of a trial: which errors are its own."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from pipeline.search import trial as module
from pipeline.search.trial import run_trial
from pipeline.storage.s3 import OutageError


def test_an_outage_is_not_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point is not at fault, so that the trial is repeated."""
    error: Exception = ValueError("two heads do not divide 5")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_run_trial", fail)
    task: Any = None
    outcome = run_trial(task, lambda _: None)
    assert (outcome.state, outcome.reason) == ("failed", "two heads do not divide 5")
    full = OSError(errno.ENOSPC, "No space left", "/x")
    for problem in (OutageError("s3://bucket/x: storage failed for 600 s"), full):
        error = problem
        with pytest.raises(OutageError):
            run_trial(task, lambda _: None)
