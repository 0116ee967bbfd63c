"""Command lines that cannot be meant: exit code 2, one line, no traceback, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, small_config
from tests.support.searches import G, write_search


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["run", "run.yaml", "--set", "model.static_expansion=[1000000000000]"], "input should be less than"),
        (["run", "run.yaml", "--set", "data.test_splits=[tset]"], "data.test_splits (tset): no image"),
        (["run", "run.yaml", "--address", "nonsense"], "nonsense (or RAY_ADDRESS) is no address of a Ray cluster"),
        (["extract", "run.yaml", "--set", "backbone.weights=/nowhere"], "backbone.weights: /nowhere does not exist"),
        (["evaluate", "run.yaml"], "run demo is not finished in"),
        (["evaluate", "run.yaml", "--split", "tset"], "--split tset: no image is in it; the splits are novel, test"),
        (["evaluate", "run.yaml", "--stage", "nothing"], "--stage nothing: the configuration has the stages"),
        (["check", "run.yaml", "--set", "data.val_split=dev"], "data.val_split: no image"),
        (["retrain", "run.yaml", "--set", "init_from=/nowhere"], "init_from: /nowhere is not a model bundle"),
        (["tune", "search.yaml", "--set", 
          f"space={{{G}: {{generate: {{groups: [1000000000], smallest: 1, largest: 2}}}}}}"], "groups.0 = 1000000000"),
        (["tune", "search.yaml", "--set", "backbone.weights=/nowhere"], "backbone.weights: /nowhere is no file"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_command_that_cannot_be_meant_leaves_nothing_behind(tmp_path: Path, words: list[str], found: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    write_search(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = subprocess.run(
        [sys.executable, "-m", "raycap", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("raycap: ") and result.stderr.count("\n") == 1 and found in result.stderr
    assert not result.stdout and sorted(tmp_path.rglob("*")) == before
