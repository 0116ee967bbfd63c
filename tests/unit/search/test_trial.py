"""The end of a trial: which errors are its own, and what it leaves on its machine."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from jobs.tune.features import extract_once
from pipeline.data.loading import find_data
from pipeline.runs.folder import RunFolder
from pipeline.search import trial as module
from pipeline.search.spec import Search, SearchConfig
from pipeline.search.trial import TrialTask, run_trial
from pipeline.search.trials import SearchPlan
from pipeline.storage.s3 import OutageError
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL


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


def test_a_trial_leaves_no_copy_of_its_run_that_nobody_uses(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial finishes. The second one is stopped, and another process has pulled its run meanwhile."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    storage = {"uri": f"s3://data/{tmp_path.name}", "endpoint_url": s3}
    values = small_config(storage, model=SMALL_MODEL | MESHED_MEMORY)
    values["features"] = {"hdf5": "synthetic", "max_regions": 3}
    del values["backbone"]
    values["stages"] = values["stages"][:1]
    section = {"name": "slots", "base": "base.yaml", "space": {"model.num_memory_slots": [0, 2]}, "algorithm": "grid"}
    section["objectives"] = {"CIDEr-D": "max"}
    search = Search(SearchConfig.model_validate(section), values)
    store, bad = extract_once(search, find_data(search.base)[0], None, lambda: None)
    first, second = (TrialTask(SearchPlan(search, None, None, store, bad), point, 0) for point in search.space.points())

    def copies() -> list[str]:
        return [path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("run.json")]

    def report(metrics: dict[str, Any]) -> None:
        assert sorted(copies()) == ["storage", "workers"]

    outcome = run_trial(first, report)
    assert outcome.state == "finished", outcome
    assert not copies() and not list(tmp_path.rglob("*.safetensors"))

    def stop(metrics: dict[str, Any]) -> None:
        (path,) = (tmp_path / "storage").glob("*/runs/*/run.json")
        RunFolder(path.parent, search.base.home(f"runs/{path.parent.name}")).pull()
        raise SystemExit

    with pytest.raises(SystemExit):
        run_trial(second, stop)
    assert copies() == ["storage"]
