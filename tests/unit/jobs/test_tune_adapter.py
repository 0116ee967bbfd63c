"""Requests for processes: how many a search makes, which trial a process gets, and what happens when one is lost."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError
from ray.train._internal.storage import StorageContext
from ray.tune.experiment import Trial

from raycap.jobs.tune import adapter as module
from raycap.jobs.tune.adapter import TuneAdapter
from raycap.jobs.tune.command import _lease
from raycap.pipeline.cluster.capacity import ClusterStatus
from raycap.pipeline.cluster.stalls import StalledError
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.search.trials import SearchFolder, TrialLog, TrialOutcome
from raycap.pipeline.storage.lease import Lease, LostLeaseError, take_lease
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import OutageError
from tests.support.searches import LR, finished, open_log, small_search

COUNTER = itertools.count()
LOST = str(ActorUnavailableError("the node does not answer", b"0" * 16))


def adapter_of(tmp_path: Path, *, on_cluster: bool = True, **changes: Any) -> TuneAdapter:
    log = open_log(small_search(tmp_path, **changes), tmp_path / "search")
    return TuneAdapter(log, lambda: None, on_cluster=on_cluster)


def requests(adapter: TuneAdapter) -> list[str]:
    """Requests processes for Ray Tune's trials until the adapter wants no more; returns their ids."""
    names = []
    while adapter.request(name := f"id-{next(COUNTER)}"):
        names.append(name)
    return names


def assigned(adapter: TuneAdapter, name: str) -> Any:
    """What a process that starts reads."""
    adapter.on_start(name)
    return json.loads((adapter.log.folder.assignments / name).read_bytes())


def end(adapter: TuneAdapter, name: str) -> None:
    adapter.on_result(name, {"outcome": finished(0.5, 1.0)})
    adapter.on_stop(name, 1.0)


def test_a_search_asks_a_cluster_for_a_process_per_trial(tmp_path: Path) -> None:
    """It asks whatever nodes there are. A trial gets its point when its process starts, not before."""
    adapter = adapter_of(tmp_path, budget={"trials": 4})
    names = requests(adapter)
    assert len(names) == 4 and not adapter.log.records and adapter.num_waiting == 4
    assert [assigned(adapter, name)["number"] for name in names[:3]] == [1, 2, 3]
    assert len(adapter.log.records) == 3 and adapter.num_waiting == 1 and not requests(adapter)
    for name in names[:3]:
        end(adapter, name)
    assert assigned(adapter, names[3])["number"] == 4
    end(adapter, names[3])
    assert adapter.request("last") is None, "the search is over"


def test_a_lost_node(tmp_path: Path) -> None:
    """A trial whose process was lost is the next to start. A process that had no trial yet is asked for again."""
    adapter = adapter_of(tmp_path, budget={"trials": 2})
    first, second = requests(adapter)
    adapter.on_error(second, LOST)
    assert not adapter.log.records and len(requests(adapter)) == 1
    point = assigned(adapter, first)["point"]
    adapter.on_error(first, LOST)
    (again,) = requests(adapter)
    assert assigned(adapter, again) == {"number": 1, "point": point, "seed": 0, "handover": None}


def test_a_process_that_cannot_start_costs_a_trial(tmp_path: Path) -> None:
    """So the search ends and does not ask for processes for ever."""
    adapter = adapter_of(tmp_path, budget={"trials": 2})
    for name in requests(adapter):
        adapter.on_error(name, str(ActorDiedError()))
    assert [record.state for record in adapter.log.records] == ["failed", "failed"]
    assert adapter.request("last") is None


class Gadget:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def failed_trial(folder: Path, error: Exception) -> Any:
    """A trial of Ray Tune that failed in this way. Somebody has replaced its pickled error."""
    trial = Trial("none", stub=True, storage=StorageContext(str(folder), experiment_dir_name="s", trial_dir_name="t"))
    trial.handle_error(error)
    if trial.pickled_error_file:
        Path(trial.pickled_error_file).write_bytes(pickle.dumps(Gadget(folder / "ran")))
        Path(trial.storage.trial_fs_path).mkdir(parents=True)
        shutil.copy(trial.pickled_error_file, trial.storage.trial_fs_path)
    return trial


NODE_DIED = ActorDiedError()
NODE_DIED.error_msg += "\n\tclass_name: T\nThe actor died because its node has died."
OOM = "Task failed. 1 worker(s) were killed due to the node running low on memory. See the log"


@pytest.mark.parametrize(
    ("error", "is_lost", "reason"),
    [
        (
            ActorUnavailableError("no answer", b"0" * 16),
            True,
            "its process died (killed, or out of memory): The actor ",
        ),
        (NODE_DIED, True, "its process died (killed, or out of memory): The actor died unexpectedly "),
        (ActorDiedError(), False, "its process died (killed, or out of memory): The actor died unexpectedly "),
        (OutOfMemoryError(OOM), False, "out of memory: Ray ended its process because the node's memory was full"),
        (
            RayTaskError("f", "Traceback\nKeyError: the node has died", KeyError()),
            False,
            "Traceback KeyError: the node",
        ),
    ],
)
def test_an_error_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool, reason: str
) -> None:
    """Nothing is unpickled, also not by Ray Tune at the end of the search."""
    monkeypatch.setattr(Trial, "local_path", str(tmp_path))
    trial = failed_trial(tmp_path, error)
    text = module._error_of(trial)
    assert module._is_node_lost(text) is is_lost and module._failure_reason(text).startswith(reason)
    assert trial.get_pickled_error() is None and not (tmp_path / "ran").exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets the time of the adapter, in minutes from now. The cluster waits for one worker."""
    status = ClusterStatus(nodes=[{"CPU": 1.0}], pending=[{"CPU": 1.0}], num_starting=0)
    monkeypatch.setattr("raycap.pipeline.cluster.stalls.cluster_status", lambda: status)
    begin = module.time.monotonic()
    yield lambda minutes: monkeypatch.setattr(module.time, "monotonic", lambda: begin + 60 * minutes)


def test_the_journal_of_a_trial_counts_as_progress(tmp_path: Path, clock: Callable[[float], None]) -> None:
    """A trial may validate less often than every `workers.max_stall_minutes`."""
    adapter = adapter_of(tmp_path, budget={"trials": 1})
    (name,) = requests(adapter)
    assigned(adapter, name)
    journal = tmp_path / "run" / JOURNAL
    journal.mkdir(parents=True)
    adapter.on_result(name, {"run": str(tmp_path / "run")})
    for minutes in range(1, 200):
        clock(minutes)
        (journal / "00001.jsonl").write_text("entry\n" * minutes)
        adapter.on_step()
    with pytest.raises(StalledError):
        for minutes in range(200, 270):
            clock(minutes)
            adapter.on_step()
    assert minutes > 255


def test_a_trial_that_cannot_reach_its_storage_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(Trial, "local_path", str(tmp_path))
    adapter = adapter_of(tmp_path, budget={"trials": 1})
    cause = OutageError("s3://bucket/x: storage failed for 600 s: no answer")
    text = f'ray::ImplicitFunc.train() (pid=1)\n  File "x.py"\n{OutageError.__module__}.OutageError: {cause}'
    error = module._error_of(failed_trial(tmp_path, RayTaskError("train", text, cause)))
    for _ in range(module.MAX_LOST_NODES):
        (name,) = requests(adapter)
        assert assigned(adapter, name)["number"] == 1
        adapter.on_error(name, error)
        assert adapter.log.records[0].state == "running"
    assert "trial 1  could not reach its storage; it resumes" in log_lines
    (name,) = requests(adapter)
    assigned(adapter, name)
    adapter.on_error(name, error)
    assert adapter.log.records[0].state == "failed" and "no answer" in adapter.log.records[0].reason


def test_a_search_that_has_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    """It records neither a trial that starts nor a validation."""
    search = small_search(tmp_path)
    folder = SearchFolder(tmp_path / "search", storage_path(tmp_path / "home"))
    lease_file = storage_path(tmp_path / "home.lease.json")
    message = "has passed to process .* the other process continues the search"
    with pytest.raises(JobFailedError, match=message), _lease(folder) as lease:
        log = TrialLog(folder, search, lease)
        assert isinstance(take_lease(lease_file, 30, by_force=True), Lease)
        log.start_next()
    assert not folder.records()
    log = TrialLog(SearchFolder(tmp_path / "other"), search)
    record = log.start_next()
    assert record is not None
    log.lease = lease
    with pytest.raises(LostLeaseError):
        log.report(record, {"epoch": 1.0, "CIDEr-D": 0.5, "run": "", "costs": {}})
    with pytest.raises(LostLeaseError):
        log.end(record, finished(0.5, 1.0))
    assert log.folder.records()[0].state == "running" and not log.folder.records()[0].reports


POINTS: dict[str, Any] = {"space": {LR: {"low": 1e-4, "high": 1e-2}}, "algorithm": "random", "budget": {"trials": 7}}


def fail(adapter: TuneAdapter, name: str, number: int, reason: str = "RuntimeError: torch sees no GPU") -> None:
    assigned(adapter, name)
    adapter.on_result(name, {"outcome": TrialOutcome("failed", f"{reason} ({number})")})
    adapter.on_stop(name, 1.0)


def test_a_broken_node_does_not_use_up_all_points(tmp_path: Path) -> None:
    """The broken node gets the next trial after each failure, because it is the first to be free."""
    adapter = adapter_of(tmp_path, **POINTS)
    names = requests(adapter)
    for number, name in enumerate(names[:4]):
        fail(adapter, name, number)
    with pytest.raises(JobFailedError, match=r"5 trials failed .* torch sees no GPU \(4\); .*--retry-failed"):
        fail(adapter, names[4], 4)
    assert [record.state for record in adapter.log.records] == ["failed"] * 5
    adapter.log.folder.reopen_failed()
    assert open_log(adapter.log.search, adapter.log.folder.path).num_left == 7
