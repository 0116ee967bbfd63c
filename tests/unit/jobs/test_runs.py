"""`raycap runs`: its tables, its JSON, and what it removes. `raycap sync` of a storage in which others may write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.sync import sync
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.storages import FakeStorage


@pytest.fixture
def storage(tmp_path: Path) -> FakeStorage:
    """Two runs of which one was interrupted 40 days ago, and a feature store that none of them uses."""
    storage = FakeStorage(storage_path(tmp_path / "results"))
    storage.run("demo-1")
    storage.run("demo-2", 1, complete=False)
    storage.features("f1", "of no run")
    old = time.time() - 40 * 86400
    for path in (tmp_path / "results").rglob("*"):
        os.utime(path, (old, old))
    return storage


def test_the_tables(storage: FakeStorage, capsys: pytest.CaptureFixture[str]) -> None:
    storage.write("runs/demo-\x1b[2J/run.json", b"{")
    storage.write("searches/small-1/tune/1/tuner.pkl", b"")  # of a search that was killed, which has no trials.json yet
    assert main(["runs", str(storage.place)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["demo-1", "2026-01-02T03:04", "1.2500", "1.5000", "complete"] in [line[:5] for line in lines]
    assert ["demo-2", "2026-01-02T03:04", "scst", "0.5000", "-", "interrupted"] in [line[:6] for line in lines]
    assert any(line[:1] == [r"demo-\x1b[2J"] and "damaged" in line for line in lines) and "\x1b" not in out
    assert ["small-1", "?", "interrupted"] in [line[:3] for line in lines]
    assert "; runs 3, searches 1, retrain 0, features 1, models 1" in out


def test_the_json(storage: FakeStorage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(storage.place), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in printed["runs"]] == ["demo-1", "demo-2"]
    assert printed["bytes"] > 1000 and printed["features"][0]["images"] == 7


def test_nothing_is_removed_without_yes(storage: FakeStorage, capsys: pytest.CaptureFixture[str]) -> None:
    before = storage.names()
    assert main(["runs", str(storage.place), "--prune"]) == 0
    out = capsys.readouterr().out
    assert storage.names() == before and "nothing was removed, --yes removes them" in out
    lines = [line.split() for line in out.splitlines() if line.startswith("would go")]
    assert [line[4] for line in lines] == ["features/f1"]
    assert main(["runs", str(storage.place), "--prune", "--yes"]) == 0
    assert before - storage.names() == {name for name in before if name.startswith("features/f1/")}


def test_the_storage_of_a_configuration_and_on_s3(
    s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"s3://data/runs-command/{tmp_path.name}"
    FakeStorage(StoragePath(uri, StorageOptions(s3))).run("demo-1")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", s3)
        assert main(["runs", uri]) == 0
    assert "demo-1" in capsys.readouterr().out
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(small_config({"uri": uri, "endpoint_url": s3})))
    assert main(["runs", str(file)]) == 0
    assert "demo-1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo-a/../../../../../victim", "/{tmp}/demo-a", "../demo-a"])
def test_a_run_with_another_place_in_its_name_is_left_out(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    storage = f"s3://data/sync/{tmp_path.name}"
    StoragePath(f"{storage}/runs/{name.format(tmp=tmp_path)}/run.json", StorageOptions(s3)).write_bytes(b"{}")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config({"uri": storage, "endpoint_url": s3})))
    with pytest.raises(UserError, match="contains no run"):
        sync(config)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.yaml", "cache"} and not list(tmp_path.rglob("run.json"))
