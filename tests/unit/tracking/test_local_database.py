"""MLflow's SQLite file is whole or missing, whatever is killed while it is created."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from raycap.pipeline.tracking import local_database
from raycap.pipeline.tracking.local_database import ensure_database
from tests.conftest import ROOT

# Creates the database slowly in two parts, and prints the word at its begin.
SLOW = """
import sqlite3, sys, time
from pathlib import Path
from raycap.pipeline.tracking import local_database

def create(path):
    print("begins", flush=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE trace_info (id)")
    time.sleep({seconds})
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE experiments (id)")
        connection.execute("INSERT INTO experiments VALUES (0)")

local_database._create = create
local_database.ensure_database(Path(sys.argv[1]))
"""


def start(path: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW.format(seconds=seconds), str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def num_experiments(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM experiments").fetchone()[0])


def test_a_killed_creation_leaves_no_database(tmp_path: Path) -> None:
    path, generator = tmp_path / "mlflow.db", random.Random(0)
    for _ in range(3):
        process = start(path, seconds=60)
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not path.exists()
    assert start(path, seconds=0).wait(60) == 0
    assert num_experiments(path) == 1
    assert {each.name for each in tmp_path.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}, "killed ones are removed"


def test_of_four_processes_one_creates_the_database(tmp_path: Path) -> None:
    path = tmp_path / "storage" / "mlflow.db"
    processes = [start(path, seconds=0.5) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert {process.returncode for process in processes} == {0} and sorted(outputs) == ["", "", "", "begins\n"]
    assert num_experiments(path) == 1


@pytest.mark.parametrize("tables", [(), ("runs", "trace_info"), ("trace_info", "experiments")])
def test_a_database_that_an_earlier_version_left_half_made(
    tmp_path: Path, tables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """It is set aside, and a new one is made."""
    monkeypatch.setattr(local_database, "_create", lambda path: path.write_text("new"))
    path = tmp_path / "mlflow.db"
    path.touch()
    with closing(sqlite3.connect(path)) as connection:
        for table in tables:
            connection.execute(f"CREATE TABLE {table} (id)")
    before = path.read_bytes()
    ensure_database(path)
    assert path.read_text() == "new" and (tmp_path / "mlflow.db.incomplete").read_bytes() == before
    assert "mlflow.db.incomplete" in "".join(log_lines)


def test_what_was_set_aside_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_database, "_create", lambda path: path.write_bytes(b""))
    for _ in range(3):
        ensure_database(tmp_path / "mlflow.db")
        (tmp_path / "mlflow.db").write_bytes(b"")  # SQLite reads an empty file as a database without tables
    assert len(list(tmp_path.glob("mlflow.db.incomplete*"))) == 2


def test_mlflow_uses_the_database_and_it_is_not_made_again(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    path = tmp_path / "mlflow.db"
    ensure_database(path)
    before = path.stat().st_ino
    ensure_database(path)
    client = MlflowClient(f"sqlite:///{path}")
    client.create_run(client.create_experiment("raycap"))
    assert path.stat().st_ino == before


def test_what_is_not_known_to_be_half_made_is_left_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another kind, a database of another program, and one that another process has locked."""
    monkeypatch.setattr(local_database.sqlite3, "connect", _impatient(sqlite3.connect))
    other = tmp_path / "notes.txt"
    other.write_text("not a database " * 100)
    foreign = tmp_path / "results.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE results (id)")
    locked = tmp_path / "locked.db"
    with closing(sqlite3.connect(locked)) as connection:
        connection.execute("CREATE TABLE experiments (id)")
        connection.execute("BEGIN EXCLUSIVE")
        for path in (other, foreign, locked):
            before = path.read_bytes()
            ensure_database(path)
            assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"notes.txt", "results.db", "locked.db"}


def _impatient(connect):  # type: ignore[no-untyped-def]
    """`sqlite3.connect` that does not wait 5 s for a lock."""
    return lambda path: connect(path, timeout=0.1)
