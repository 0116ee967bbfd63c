"""`raycap` as a user meets it: a whole shrunken run on Ray, run again, killed and continued."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from raycap.jobs.cli import main
from raycap.jobs.run import RunDriver
from raycap.pipeline.config.load import load_config, parse_config
from raycap.pipeline.runs.prepare import prepare
from tests.conftest import small_config
from tests.support.runs import FROZEN_STAGES, output_of, start_raycap, write_config


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.ray
def test_a_run_decides_its_precision_once(tmp_path: Path, ray_session: None) -> None:
    config = parse_config(small_config(tmp_path, features__compute_dtype="auto"))
    folder = prepare(config)
    driver = RunDriver(folder, address=None)
    driver._decide_precision()
    driver.folder.write_config()
    (record,) = (tmp_path / "precision").glob("*.json")
    decided = driver.config.features.compute_dtype
    assert decided == json.loads(record.read_text())["precision"]
    assert driver.tracker.folder is driver.folder
    record.unlink()  # a later attempt asks neither the storage nor Ray
    later = RunDriver(prepare(config), address=None)
    later._decide_precision()
    assert later.folder.run_id == folder.run_id and not list((tmp_path / "precision").glob("*.json"))
    assert later.config.features.compute_dtype == decided
    again = prepare(load_config(folder.path / "config.yaml"))
    assert again.run_id == folder.run_id and again.config == later.config


@pytest.mark.ray
def test_a_run_killed_continues_and_once_complete_is_left_alone(
    tmp_path: Path, ray_session: None, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is killed with kill -9 in the middle of xe_frozen. Then the same command runs twice.

    test_loop, and tests/faults on Ray, show that the weights are those of an undisturbed run.
    """
    stages = [stage for stage in small_config(tmp_path)["stages"] if stage["name"] in FROZEN_STAGES]
    stages[0] |= {"epochs": 10, "validate_every_epochs": 5}
    broken = tmp_path / "broken"
    settings = {"stages": stages, "workers__dry_run": False, "tracking": {"enabled": True}}
    config = write_config(tmp_path / "run.yaml", small_config(broken, **settings))

    process = start_raycap("run", str(config))
    deadline = time.monotonic() + 400
    while not list(broken.glob("runs/*/stages/xe_frozen/step-*")):
        assert process.poll() is None and time.monotonic() < deadline, output_of(process)
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()

    assert main(["run", str(config)]) == 0
    output = "\n".join(log_lines)
    assert "xe_frozen  continues from step" in output
    assert "main object" in output and "SCST" in output and "report " in output
    (run,) = broken.glob("runs/*")
    assert "finished in" in (run / "log" / "run.log").read_text()
    scores = json.loads((run / "scores.json").read_text())
    assert set(scores["splits"]) == {"test", "novel", "val"}
    assert all(0 <= entry["scores"]["CIDEr-D"] <= 10 for entry in scores["splits"].values())
    page = (run / "report.html").read_text()
    assert "data:image/jpeg;base64," in page and run.name in page

    before = tree(broken)
    monkeypatch.delattr("raycap.pipeline.runs.preflight.initial_backbone")  # its libraries take seconds to import
    assert main(["run", str(config)]) == 0
    assert any("is complete" in line for line in log_lines)
    assert tree(broken) == before, "a complete run is not touched"

    check_tracker(broken, run.name)


def check_tracker(storage: Path, run_id: str) -> None:
    """One parent run has a child for each stage, each step is logged once, and the registered model captions."""
    import mlflow
    from mlflow import MlflowClient

    uri = f"sqlite:///{storage / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("raycap")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1 and parents[0].data.tags["raycap.run_id"] == run_id
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 1 + len(FROZEN_STAGES)
    for run in runs:
        if run not in parents:
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
            assert steps == sorted(set(steps)) and steps
    assert "test_CIDEr-D" in parents[0].data.metrics
    names = {artifact.path for artifact in client.list_artifacts(parents[0].info.run_id)}
    assert {"report.html", "scores.json", "config.yaml"} <= names

    import pandas

    mlflow.set_tracking_uri(uri)
    model = mlflow.pyfunc.load_model("models:/demo/1")
    picture = next(storage.glob("data/*/images/*.png")).read_bytes()
    (row,) = model.predict(pandas.DataFrame({"image": [picture]}))
    assert isinstance(row["caption"], str) and row["log_prob"] < 0
