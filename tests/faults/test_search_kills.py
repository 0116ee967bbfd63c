"""A search killed with kill -9 at random moments, and a trial's process killed: ended trials are not run again.

Long tests (`make proof`); `tests/unit/search/test_trials.py` and `tests/integration/test_tune.py` are the short ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import output_of, start_raycap
from tests.support.searches import N_E, G, write_search

NUM_TRIALS = 12


def search(folder: Path) -> Path:
    space = {G: {"generate": {"groups": [1, 2, 3], "smallest": 4, "largest": 16}}, N_E: [1, 2, 4]}
    trial = {"epochs": 40, "set": {"stages.xe_frozen.validate_every_epochs": 10}}
    budget = {"trials": NUM_TRIALS}
    return write_search(folder, space=space, algorithm="nsga2", population=4, budget=budget, trial=trial)


def records_of(folder: Path) -> dict[str, dict[str, Any]]:
    records = {}
    for path in sorted(folder.glob("storage/searches/*/trials/*.json")):
        records[path.name] = json.loads(path.read_text()) | {"written": path.stat().st_mtime_ns}
    return records


def ended(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: record for name, record in records_of(folder).items() if record["state"] != "running"}


@pytest.mark.proof
@pytest.mark.ray
def test_a_search_killed_at_random_runs_all_its_trials(tmp_path: Path) -> None:
    generator, path = random.Random(0), search(tmp_path)
    before: dict[str, dict[str, Any]] = {}
    for _ in range(3):
        process, known = start_raycap("tune", str(path)), len(before)
        deadline = time.monotonic() + 200
        while len(ended(tmp_path)) < known + 2:
            assert process.poll() is None and time.monotonic() < deadline, output_of(process)
            time.sleep(0.1)
        time.sleep(generator.uniform(0, 2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        before = ended(tmp_path)
        assert len(before) < NUM_TRIALS
        time.sleep(2)
    process = start_raycap("tune", str(path))
    output = output_of(process)
    assert process.returncode == 0, output
    after = records_of(tmp_path)
    assert len(after) == NUM_TRIALS and {record["state"] for record in after.values()} == {"finished"}
    assert all(after[name] == record for name, record in before.items()), "an ended trial was run again"
    assert len({str(record["point"]) for record in after.values()}) == NUM_TRIALS
    assert sum(record["attempts"] > 1 for record in after.values()) > 0
