"""A search killed with kill -9 at random moments, and a trial's process killed: what is over is not run again.

A long proof (`make proof`); `tests/unit/test_search_book.py` and `tests/integration/test_tune.py` hold the short ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.support.processes import finished
from tests.unit.search.test_spec import N_E, G, written

ASKED = 12


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "jobs", "tune", str(path)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def search(folder: Path) -> Path:
    space = {G: {"generate": {"groups": [1, 2, 3], "smallest": 4, "largest": 16}}, N_E: [1, 2, 4]}
    trial = {"epochs": 40, "set": {"stages.xe_frozen.validate_every_epochs": 10}}
    return written(folder, space=space, algorithm="nsga2", population=4, budget={"trials": ASKED}, trial=trial)


def ledger(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("storage/searches/*/trials/*.json")):
        found[path.name] = json.loads(path.read_text()) | {"written": path.stat().st_mtime_ns}
    return found


def over(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: record for name, record in ledger(folder).items() if record["state"] != "running"}


@pytest.mark.proof
@pytest.mark.ray
def test_a_search_killed_at_random_ends_with_what_was_asked(tmp_path: Path) -> None:
    generator, path = random.Random(0), search(tmp_path)
    before: dict[str, dict[str, Any]] = {}
    for _ in range(3):
        process, known = start(path), len(before)
        deadline = time.monotonic() + 200
        while len(over(tmp_path)) < known + 2:
            assert process.poll() is None and time.monotonic() < deadline, finished(process)
            time.sleep(0.1)
        time.sleep(generator.uniform(0, 2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        before = over(tmp_path)
        assert len(before) < ASKED
        time.sleep(2)
    process = start(path)
    output = finished(process)
    assert process.returncode == 0, output
    after = ledger(tmp_path)
    assert len(after) == ASKED and {record["state"] for record in after.values()} == {"finished"}
    assert all(after[name] == record for name, record in before.items()), "what was over was not run again"
    assert len({str(record["point"]) for record in after.values()}) == ASKED
    assert sum(record["attempts"] > 1 for record in after.values()) > 0


@pytest.mark.proof
@pytest.mark.ray
def test_a_trial_whose_process_is_killed_is_recorded(tmp_path: Path) -> None:
    process = start(search(tmp_path))
    deadline = time.monotonic() + 200
    victim = None
    while victim is None:
        assert process.poll() is None and time.monotonic() < deadline, finished(process)
        time.sleep(0.1)
        if len(over(tmp_path)) >= 2:
            below = psutil.Process(process.pid).children(recursive=True)
            names = [(each, " ".join(each.cmdline())) for each in below if each.is_running()]
            victim = next((each for each, name in names if "train_trial" in name or "ImplicitFunc" in name), None)
    victim.kill()
    output = finished(process)
    assert process.returncode == 0, output
    states = [record["state"] for record in ledger(tmp_path).values()]
    assert states.count("failed") == 1 and states.count("finished") == ASKED - 1
    (failed,) = [record for record in ledger(tmp_path).values() if record["state"] == "failed"]
    assert "its process died" in failed["reason"] and "1 of 12 trials failed" in output
