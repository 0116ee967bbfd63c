"""`raycap tune` on Ray: failing trials, early stopping, populations, and searches that are continued or killed."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.runs.folder import JOURNAL
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.stopping import STOPPED
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.runs import output_of, start_raycap
from tests.support.searches import LR, N_E, G, write_search

pytestmark = pytest.mark.ray
TRIAL = {"epochs": 3, "set": {"stages.xe_frozen.validate_every_epochs": 1}}
Records = list[dict[str, Any]]


def records_of(folder: Path) -> Records:
    """The trials of the only search below the folder `searches`."""
    (path,) = folder.glob("searches/*/trials.json")
    records: Records = json.loads(path.read_text())
    return records


def comparable(records: Records) -> dict[str, Any]:
    """What is equal for a search that was disturbed, by point and seed: scores and costs."""
    found = {}
    for record in records:
        assert record["state"] == "finished", record
        found[f"{record['point']} {record['seed']}"] = record["reports"], record["scores"], record["costs"]
    assert len(found) == len(records), "each point and seed is there once"
    return found


def training_of(storage: Path) -> dict[str, float]:
    """The time at which each run's journal was last written, by the run's name."""
    journals = {path.name: path / JOURNAL for path in storage.glob("runs/demo-*") if path.is_dir()}
    return {name: max(part.stat().st_mtime for part in path.iterdir()) for name, path in journals.items()}


def test_failed_trials_are_repeated_and_the_others_finish(
    tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trial diverges each time. Afterwards the search runs again: whole, without a snapshot, and with a cut one."""
    rows = [{G: [4]}, {LR: 1e30}, {G: [8]}]
    changes = {"score_split": "test", "set": {"tracking.enabled": True}, "algorithm": "grid", "budget": {}}
    words = ["tune", str(write_search(tmp_path, space={"row": rows}, trial=TRIAL, **changes))]
    storage = tmp_path / "storage"
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "Reported on test: the chosen weights caption it once, with beam 2" in output
    assert "warning      1 of 3 trials failed" in output and "importance" not in output
    records = sorted(records_of(storage), key=lambda record: record["point"]["row"])
    assert [record["state"] for record in records] == ["finished", "finished", "failed"]
    (errors,) = storage.glob(f"searches/*/tune/*/{records[2]['trial_id']}/error.txt")
    assert errors.read_text().count("Failure # ") == 1 + 3, "repeated three times"
    assert records[2]["reason"].startswith("DivergedError: the loss is")
    assert [epoch for epoch, _ in records[0]["reports"]] == [1.0, 2.0, 3.0]
    metrics = {"BLEU-4", "ROUGE-L"}
    names = metrics | {f"test {name}" for name in (*metrics, "CIDEr-D")}
    assert records[0]["scores"].keys() == names and records[0]["costs"]["macs"] > 0
    (folder,) = storage.glob("searches/*")
    for name in ("trials.csv", "pareto.png", "search.html", "front-1.yaml"):
        assert (folder / name).stat().st_size > 100
    assert len((folder / "trials.csv").read_text().splitlines()) == 1 + 3
    best = load_config(folder / "best.yaml")
    assert best.model.static_expansion in ((4,), (8,)) and [stage.epochs for stage in best.stages] == [0.7] * 4
    link = Path(records[0]["run"]) / "init" / "backbone.safetensors"
    assert link.stat().st_nlink >= 3, "the backbone is stored once"
    check_tracker(storage)

    runs = {Path(record["run"]).name for record in records[:2]}
    trained = {name: when for name, when in training_of(storage).items() if name in runs}
    assert main(words) == 0
    assert "continues with 3 of 3 trials done" in capsys.readouterr().out
    for damage in ("", '{"trial_data": ['):  # what a kill leaves before Ray Tune's first snapshot, or in a later one
        for path in folder.glob("tune/*/experiment_state-*"):
            path.write_text(damage) if damage else path.unlink()
        assert main(words) == 0
        states = [record["state"] for record in records_of(storage)]
        assert sorted(states) == ["failed", "finished", "finished"]
    assert len(trained) == 2 and trained.items() <= training_of(storage).items(), "no finished run is trained"


def check_tracker(storage: Path) -> None:
    """The search is a parent run with the plots, its trials are child runs."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("raycap").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert sorted(run.info.status for run in children) == ["FAILED", "FINISHED", "FINISHED"]
    assert {"pareto.png", "search.html", "best.yaml"} <= {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert sum({"CIDEr-D", "test_CIDEr-D"} <= run.data.metrics.keys() for run in children) == 2


@pytest.mark.proof
def test_a_larger_budget_and_more_seeds_train_only_what_is_new(tmp_path: Path, ray_session: None) -> None:
    storage, trained, points = tmp_path / "storage", dict[str, float](), set[str]()
    for trials, seeds in ((2, [0]), (3, [0]), (6, [0, 5])):
        path = write_search(tmp_path, algorithm="nsga2", budget={"trials": trials}, seeds=seeds)
        assert main(["tune", str(path)]) == 0
        records = records_of(storage)
        assert len(comparable(records)) == trials == len(training_of(storage))
        assert trained.items() <= training_of(storage).items(), "no earlier run is trained"
        found = {str(record["point"]) for record in records}
        assert points <= found and len(found) == trials // len(seeds)
        trained, points = training_of(storage), found
    (table,) = storage.glob("searches/*/trials.csv")
    with table.open(newline="") as file:
        assert sorted(row["rank"] for row in csv.DictReader(file)) == ["1", "1", "2", "2", "3", "3"]


def test_asha_ends_trials_early(tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Trials run one at a time. The second learning rate makes captions worse than those of the initial weights."""
    changes: dict[str, Any] = {"space": {LR: [1e-7, 3e-2, 1e-8]}, "algorithm": "grid"}
    changes |= {"scheduler": "asha", "budget": {"concurrent": 1}, "trial": TRIAL | {"epochs": 4}}
    assert main(["tune", str(write_search(tmp_path, **changes))]) == 0
    records = records_of(tmp_path / "storage")
    assert [record["state"] for record in records] == ["finished", "stopped", "finished"]
    for record in records:
        over = (Path(record["run"]) / "stages" / "xe_frozen" / "DONE.json").is_file()
        assert over == (record["state"] == "finished")
        assert record["reports"][-1][0] == (4 if over else 1)
    assert "stopped at epoch 1" in capsys.readouterr().out
    results = (tmp_path / "storage").glob("searches/*/tune/*/*/result.json")
    processes = {json.loads(line)["pid"] for path in results for line in path.read_text().splitlines()}
    assert len(processes) == 1, "the process of a stopped trial takes the next one"


@pytest.mark.proof
def test_members_of_a_population_copy_weights(tmp_path: Path, ray_session: None) -> None:
    """A member that copied another one has its journal up to the copy. Each member and point has its own run."""
    changes: dict[str, Any] = {"space": {LR: [1e-7, 1e-3, 3e-3]}, "objectives": {"CIDEr-D": "max"}}
    changes |= {"trial": TRIAL | {"epochs": 20}, "budget": {"trials": 3}}
    path = write_search(tmp_path, scheduler={"name": "pbt", "every_epochs": 2, "quantile": 0.5}, **changes)
    assert main(["tune", str(path)]) == 0
    records = records_of(tmp_path / "storage")
    assert [record["state"] for record in records] == ["finished"] * 3
    runs = [Path(record["run"]) for record in records]
    assert len(set(runs)) == 3
    firsts = [next(entry for entry in read_journal(run / JOURNAL) if entry["kind"] == "validation") for run in runs]
    assert len({entry["time"] for entry in firsts}) < 3, "no member copied another one"
    assert all(len(record["reports"]) == 20 for record in records)


KILLED: dict[str, Any] = {
    "space": {N_E: [1, 2, 3, 4], LR: {"low": 1e-4, "high": 1e-2, "log": True}},
    "algorithm": "tpe",
    "budget": {"trials": 4, "concurrent": 1},  # one after the other, so that TPE proposes the same points
    "trial": TRIAL | {"epochs": 12},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["tune", str(write_search(folder, **KILLED))]) == 0
    return comparable(records_of(folder / "storage"))


def ended_by(number: signal.Signals, words: list[str], text: str, wait_s: float = 0) -> str:
    """The output of a command that gets a signal some time after it has printed a text."""
    process, lines = start_raycap(*words), []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if re.search(text, line):
            break
    time.sleep(wait_s)
    os.kill(process.pid, number)
    output = "".join(lines) + output_of(process)
    assert process.returncode == (130 if number == signal.SIGINT else -number), output
    return output


def finish(words: list[str]) -> str:
    """The output of a command that must succeed."""
    process = start_raycap(*words)
    output = output_of(process)
    assert process.returncode == 0, output
    return output


def test_stopped_and_killed_searches_continue(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Ctrl-C in one trial, and SIGKILL in it or in a later one."""
    words = ["tune", str(write_search(tmp_path, **KILLED))]
    output = ended_by(signal.SIGINT, words, "epoch [3-9]: ")
    assert output.splitlines()[-1] == STOPPED, output
    output += ended_by(signal.SIGKILL, words, "epoch [3-9]: ", wait_s=1) + finish(words)
    assert comparable(records_of(tmp_path / "storage")) == undisturbed
    assert output.count("epoch 1: ") <= 4 + 1, "a trial continues from its checkpoint"


@pytest.mark.proof
@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment(tmp_path: Path, undisturbed: dict[str, Any], moment: int) -> None:
    words = ["tune", str(write_search(tmp_path, **KILLED))]
    ended_by(signal.SIGKILL, words, "search  ", wait_s=random.Random(moment).uniform(0, 14))
    finish(words)
    assert comparable(records_of(tmp_path / "storage")) == undisturbed


@pytest.mark.proof
def test_killed_and_continued_on_another_machine(
    tmp_path: Path, undisturbed: dict[str, Any], s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage is on S3, and the second process has another cache."""
    words = ["tune", str(write_search(tmp_path, **KILLED))]
    storage = {"uri": "s3://data/killed-search", "endpoint_url": s3}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(small_config(storage)))
    searches = StoragePath(storage["uri"], StorageOptions(endpoint_url=s3)) / "searches"
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "one"))
    ended_by(signal.SIGKILL, words, "epoch [3-9]: ", wait_s=12)
    (lease,) = [name for name in searches.list() if name.endswith(".lease.json")]
    (searches / lease).delete()  # it would expire after two minutes
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "two"))
    finish(words)
    (trials,) = [name for name in searches.list() if name.endswith("/trials.json")]
    assert comparable(json.loads((searches / trials).read_bytes())) == undisturbed
