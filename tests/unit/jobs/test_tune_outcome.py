"""The end of a search: its tables are written whatever happens to its pictures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycap.jobs.tune.outcome import write_outcome
from raycap.pipeline.search.tracking import SearchTracker
from tests.support.searches import N_E, finished, open_log, run_log, small_search

PICTURES = ("search.html", "pareto.png")


def test_pictures_that_fail_cost_no_result_and_are_made_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    folder = tmp_path / "search"
    log = open_log(small_search(tmp_path), folder)
    run_log(log, lambda changes, seed: finished(changes[N_E] / 10, 100.0))
    closed: list[str] = []
    tracker = cast(SearchTracker, SimpleNamespace(close=lambda status, files: closed.append(status)))
    with monkeypatch.context() as failing:
        for name in ("comparisons", "importances", "write_plot", "write_page"):
            failing.setattr(f"raycap.jobs.tune.outcome.{name}", broken)
        assert write_outcome(log, tracker) == 0
    for name in ("comparisons", "importance", "plot", "page"):
        expected = f"the {name} could not be made (RuntimeError: broken on purpose); the same command makes it again"
        assert log_lines.count(expected) == 1
    assert closed == ["FINISHED"]
    assert all((folder / name).is_file() for name in ("trials.parquet", "trials.csv", "best.yaml"))
    assert not any((folder / name).exists() for name in PICTURES)
    log_lines.clear()
    assert write_outcome(log, tracker) == 0
    assert all((folder / name).is_file() for name in PICTURES)
    assert not any("could not be made" in line for line in log_lines)
