"""A tracker that stops in the middle of a run, or never answers: it gets everything once, later."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from raycap.jobs.cli import main
from raycap.pipeline.config.sections import TrackingSection
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import Journal, read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.atomic import read_json, write_json
from raycap.pipeline.tracking import run_tracker
from raycap.pipeline.tracking.mlflow_client import experiment_of, tracking_client
from raycap.pipeline.tracking.run_tracker import NOT_METRICS, SENT_FILE, SENT_KINDS, Tracker, sync
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config
from tests.support.mlflow_server import MlflowServer, mlflow_server
from tests.support.runs import STAGES, Killed, empty_run, prepare_run, write_config


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(run_tracker, "LONGEST_PAUSE_S", 0.2)


def at_step(monkeypatch: pytest.MonkeyPatch, actions: dict[tuple[str, int], Any]) -> None:
    """Calls an action before a step of a stage, once."""
    original = StageRun.step

    def step(self: StageRun, number: int, batches: Any) -> Any:
        action = actions.pop((self.stage.name, number), None)
        if action is not None:
            action(self)
        return original(self, number, batches)

    monkeypatch.setattr(StageRun, "step", step)


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def sent_steps(folder: RunFolder, kind: str) -> int:
    path = folder.path / SENT_FILE
    (known,) = read_json(path).values() if path.is_file() else [{"sent": {}}]
    return int(known["sent"].get(kind, -1))


def runs_on(server: MlflowServer, run_id: str) -> tuple[Any, list[Any]]:
    """The parent and its stages' runs; there may be one parent only."""
    from mlflow import MlflowClient

    client = MlflowClient(server.url)
    ids = [found.experiment_id for found in client.search_experiments()]
    found = client.search_runs(ids, f"tags.`raycap.run_id` = '{run_id}'")
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    return parents[0], [run for run in found if run is not parents[0]]


def check_history(server: MlflowServer, folder: RunFolder) -> None:
    """Compares the tracker's metrics with the journal: each step is there once, with its value."""
    from mlflow import MlflowClient

    client = MlflowClient(server.url)
    _, children = runs_on(server, folder.run_id)
    entries = [entry for entry in read_journal(folder.journal) if entry["kind"] in SENT_KINDS]
    assert sorted(run.info.run_name for run in children) == sorted({entry["stage"] for entry in entries})
    for run in children:
        expected: dict[str, list[tuple[int, float]]] = {}
        for entry in entries:
            if entry["stage"] == run.info.run_name:
                prefix = "validation_" if entry["kind"] == "validation" else ""
                for key in entry.keys() - {"stage", "kind", *NOT_METRICS}:
                    expected.setdefault(prefix + key, []).append((entry["step"], entry[key]))
        assert "loss" in expected and "images_per_s" in expected
        assert run.data.metrics.keys() == expected.keys()
        for key, points in expected.items():
            history = client.get_metric_history(run.info.run_id, key)
            assert [(metric.step, metric.value) for metric in history] == points, f"{run.info.run_name} {key}"


def complete(folder: RunFolder, tracker: Tracker) -> str | None:
    """Does what a run does after its stages, with invented scores."""
    scores = {"test_CIDEr-D": 0.5}
    write_json(folder.path / "scores.json", {"splits": {"test": {"signature": "beam2"}}})
    write_json(folder.path / "predictions" / "test.json", [])
    (folder.path / "report.html").write_text("<p>report</p>")
    registered = tracker.finish(scores, bundle_run(folder))
    summary = {"scores": scores, "table": "", "durations": {}, "tracked": registered is not None}
    write_json(folder.path / "COMPLETE.json", summary)
    return registered


def test_stopped_in_the_middle_everything_is_there_once(
    server: MlflowServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log_lines: list[str],
) -> None:
    tracking = {"enabled": True, "uri": server.url}
    folder, store = prepare_run(tmp_path, tracking=tracking)
    config = write_config(tmp_path / "run.yaml", small_config(tmp_path, tracking=tracking))
    folder = replace(folder, config=folder.config.model_copy(update={"tracking": _tracking(server)}))
    log_lines.clear()
    tracker = Tracker(folder, every_s=0.1)

    def kill(stage: StageRun) -> None:
        wait_for(lambda: sent_steps(folder, "xe_finetune/train") >= 2, "nothing was sent")
        server.kill()

    at_step(
        monkeypatch, {("xe_finetune", 3): kill, ("scst_frozen", 1): lambda stage: wait_for(lambda: log_lines, "silent")}
    )
    tracker.start()
    train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store))
    assert complete(folder, tracker) is None
    assert len(log_lines) == 1 and "`raycap sync CONFIG` sends it" in log_lines[0], log_lines
    assert main(["sync", str(config)]) == 1, "still down"

    server.start()
    assert main(["sync", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "FINISHED, model demo/" in printed
    assert "View run" not in printed, "MLflow would print the address, with the password that may stand in it"
    check_history(server, folder)
    parent, children = runs_on(server, folder.run_id)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert parent.data.tags["raycap.signature"] == "beam2"
    assert parent.data.tags["raycap.data_fingerprint"] == folder.metadata.data_fingerprint
    assert parent.data.params["model.d_model"] == "16" and "tracking.uri" not in parent.data.params
    signed = {run.info.run_name for run in children if "raycap.signature" in run.data.tags}
    assert signed == {"scst_frozen", "scst_finetune"}

    from mlflow import MlflowClient

    files = {item.path for item in MlflowClient(server.url).list_artifacts(parent.info.run_id)}
    assert {"config.yaml", "report.html", "scores.json", "predictions"} <= files
    assert main(["sync", str(config)]) == 0, "nothing is sent again"
    check_history(server, folder)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert main(["sync", str(config), "--set", f"tracking.uri={other}"]) == 0
    assert [model.name for model in MlflowClient(other).search_registered_models()] == ["demo"], "a second tracker"


def _tracking(server: MlflowServer) -> Any:
    return TrackingSection(uri=server.url)


@pytest.mark.proof
def test_training_that_fails_while_the_tracker_is_down_is_failed_afterwards(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = prepare_run(tmp_path, seed=1)
    folder = replace(folder, config=folder.config.model_copy(update={"tracking": _tracking(server)}))
    tracker = Tracker(folder, every_s=0.1)

    def fail(stage: StageRun) -> None:
        raise Killed

    at_step(monkeypatch, {("xe_finetune", 0): lambda stage: server.kill(), ("xe_finetune", 3): fail})
    tracker.start()
    with pytest.raises(Killed):
        train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store))
    assert not tracker.close("FAILED")
    server.start()
    tracking = {"enabled": True, "uri": server.url}
    assert main(["sync", str(write_config(tmp_path / "run.yaml", small_config(tmp_path, tracking=tracking)))]) == 0
    check_history(server, folder)
    parent, children = runs_on(server, folder.run_id)
    statuses = {run.info.run_name: run.info.status for run in [parent, *children]}
    assert statuses == {folder.run_id: "FAILED", "xe_frozen": "FINISHED", "xe_finetune": "FAILED"}


def test_a_tracker_is_left_at_its_first_failure_and_a_damaged_record_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    folder = empty_run(tmp_path / "demo-1")
    folder = replace(folder, config=folder.config.model_copy(update={"tracking": TrackingSection(uri="http://x")}))
    client = MagicMock()
    client.log_batch.side_effect = TimeoutError("no answer")
    monkeypatch.setattr(run_tracker, "tracking_client", lambda config: client)
    monkeypatch.setattr(RunFolder, "metadata", MagicMock(created="now", commit="0", data_fingerprint="0"))
    write_json(folder.path / "config.yaml", {})
    for damaged in ("[]", '{"http://x": {}}', "{"):
        (folder.path / "log").mkdir(exist_ok=True)
        (folder.path / SENT_FILE).write_text(damaged)
        client.reset_mock()
        log_lines.clear()
        tracker = Tracker(folder, every_s=60)
        tracker.start()
        assert tracker.finish({}, tmp_path) is None
        client.log_batch.assert_called_once()
        assert "is damaged; the tracker gets everything" in log_lines[0]
        assert "does not accept everything (no answer)" in log_lines[-1], log_lines


def test_a_copy_of_an_unfinished_run_does_not_end_the_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, client = empty_run(tmp_path / "demo-1"), MagicMock()
    client.get_run.return_value.info.status = "FINISHED"
    monkeypatch.setattr(RunFolder, "metadata", MagicMock(created="now", commit="0", data_fingerprint="0"))
    write_json(folder.path / "config.yaml", {})
    for status in ("KILLED", "FAILED", "FINISHED"):
        sync(folder, client, status=status)
        assert client.set_terminated.called == (status == "FINISHED")


def test_a_tracker_that_never_answers_is_left_after_its_deadline(tmp_path: Path, log_lines: list[str]) -> None:
    """The port accepts connections and never answers. The tracker waits for the deadline of one call, not of each."""
    folder, _ = prepare_run(tmp_path, seed=3)
    server = MlflowServer(tmp_path / "mlflow")
    folder = replace(folder, config=folder.config.model_copy(update={"tracking": _tracking(server)}))
    Journal(folder.journal, "xe_frozen", 0).write("train", 1, {"loss": 1.0})
    log_lines.clear()
    tracker = Tracker(folder, every_s=0.1)
    with server.silent():
        tracker.start()
        wait_for(lambda: log_lines, "the tracker never gave up")
        assert not tracker.close("FAILED")
    assert "timed out" in log_lines[0].lower() and "raycap sync" in log_lines[0], log_lines
    assert json.loads((folder.path / SENT_FILE).read_text())[server.url]["ending"] == "FAILED"


def test_a_deleted_experiment_or_run_can_be_restored(tmp_path: Path, log_lines: list[str]) -> None:
    """The run continues without the tracker. The line names the remedy, after which `raycap sync` sends the rest."""
    tracking = {"enabled": True, "experiment": "photos"}
    folder, _ = prepare_run(tmp_path, tracking=tracking)
    config = write_config(tmp_path / "run.yaml", small_config(tmp_path, tracking=tracking))
    client = tracking_client(folder.config)
    experiment = experiment_of(client, folder.config)
    client.delete_experiment(experiment)
    for number, (sent, words) in enumerate(
        (
            (False, rf"its experiment photos is deleted; restore it \(mlflow experiments restore -x {experiment}\)"),
            (True, ""),
            (False, "the 'active' state. Current state is deleted. Restore it or its experiment in MLflow."),
        )
    ):
        log_lines.clear()
        Journal(folder.journal, "xe_frozen", number).write("train", number + 1, {"loss": 1.0})
        if sent:
            client.restore_experiment(experiment)
        assert Tracker(folder).close("FAILED") == sent
        assert main(["sync", str(config)]) == int(not sent)
        assert re.search(words, log_lines[0]) and ("raycap sync CONFIG" in log_lines[0]) == (not sent)
        if sent:
            client.delete_experiment(experiment)
