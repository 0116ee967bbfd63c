"""`raycap tune` on Ray: failing trials, a search that runs again, and early stopping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.data.caption_files import read_predictions
from tests.support.searches import LR, G, write_search

TRIAL = {"epochs": 3, "set": {"stages.xe_frozen.validate_every_epochs": 1}}


def records_of(storage: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(storage.glob("searches/*/trials/*.json"))]


@pytest.mark.ray
def test_failed_trials_are_recorded_and_the_others_finish(
    tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trial diverges, one has groups too large for any memory, two are fine."""
    rows = [{G: [4]}, {LR: 1e30}, {G: [3_000_000_000]}, {G: [8]}]
    base_set = {"tracking.enabled": True}
    changes = {"score_split": "test", "set": base_set}
    path = write_search(tmp_path, space=None, rows=rows, algorithm="grid", budget={}, trial=TRIAL, **changes)
    storage = tmp_path / "storage"
    assert main(["tune", str(path)]) == 0
    output = capsys.readouterr().out
    assert "Reported on test: the chosen weights caption it once, with beam 2" in output
    assert "warning      2 of 4 trials failed" in output and "importance" not in output
    records = records_of(storage)
    assert [record["state"] for record in records] == ["finished", "failed", "failed", "finished"]
    assert records[1]["reason"].startswith("DivergedError: the loss is")
    assert records[2]["reason"].startswith("out of memory: ")
    assert [epoch for epoch, _ in records[0]["reports"]] == [1.0, 2.0, 3.0]
    metrics = {"BLEU-4", "ROUGE-L"}
    names = metrics | {f"test {name}" for name in (*metrics, "CIDEr-D")}
    assert records[0]["scores"].keys() == names and records[0]["costs"]["macs"] > 0
    assert {len(read_predictions(path)) for path in storage.glob("runs/*/predictions/test.json")} == {6}
    (folder,) = storage.glob("searches/*")
    for name in ("trials.csv", "pareto.png", "search.html", "front-1.yaml"):
        assert (folder / name).stat().st_size > 100
    assert pyarrow.parquet.read_table(folder / "trials.parquet").num_rows == 4
    best = load_config(folder / "best.yaml")
    assert best.model.static_expansion in ((4,), (8,)) and [stage.epochs for stage in best.stages] == [0.7] * 4
    for record in (records[0], records[3]):
        link = Path(record["run"]) / "init" / "backbone.safetensors"
        assert link.stat().st_nlink >= 3, "the backbone is stored once"
    check_tracker(storage)

    before = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*.json")}
    assert main(["tune", str(path)]) == 0
    assert "continues with 4 trials done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trials/*.json")} == before


def check_tracker(storage: Path) -> None:
    """The search is a parent run with the plots, its trials are child runs."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("raycap").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.info.status for run in children) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    assert {"pareto.png", "search.html", "best.yaml"} <= {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert sum({"CIDEr-D", "test_CIDEr-D"} <= run.data.metrics.keys() for run in children) == 2


@pytest.mark.proof
@pytest.mark.ray
def test_when_every_trial_fails_the_exit_code_is_1(
    tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_search(tmp_path, space=None, rows=[{LR: 1e30}], algorithm="grid", budget={}, trial=TRIAL)
    assert main(["tune", str(path)]) == 1
    assert "failed       1 of 1 trials failed; trial 1: DivergedError" in capsys.readouterr().out
    assert main(["tune", str(path), "--retry-failed"]) == 1
    assert "1 trials that failed run again" in capsys.readouterr().out
    (record,) = records_of(tmp_path / "storage")
    assert record["state"] == "failed" and record["attempts"] == 2


@pytest.mark.ray
def test_asha_ends_trials_early(tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Trials run one at a time. The second learning rate makes captions worse than those of the initial weights."""
    rows = [{LR: 1e-7}, {LR: 3e-2}, {LR: 1e-8}]
    asha = {"name": "asha", "grace_epochs": 1, "reduction": 2}
    changes: dict[str, Any] = {"scheduler": asha, "budget": {"concurrent": 1}, "trial": TRIAL | {"epochs": 4}}
    assert main(["tune", str(write_search(tmp_path, space=None, rows=rows, algorithm="grid", **changes))]) == 0
    records = records_of(tmp_path / "storage")
    assert [record["state"] for record in records] == ["finished", "stopped", "finished"]
    for record in records:
        over = (Path(record["run"]) / "stages" / "xe_frozen" / "DONE.json").is_file()
        assert over == (record["state"] == "finished")
        assert record["reports"][-1][0] == (4 if over else 1)
    assert "stopped at epoch" in capsys.readouterr().out
