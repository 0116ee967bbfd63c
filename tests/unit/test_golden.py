"""The script beside the golden files: it knows the source of each, and notices every difference."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.golden import GOLDEN


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(GOLDEN / "record.py"))


def test_every_golden_file_has_a_source(script: dict[str, Any]) -> None:
    paths = [path for path in GOLDEN.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {path.relative_to(GOLDEN).as_posix() for path in paths} == script["FILES"].keys()
    assert {recording.source for recording in script["FILES"].values()} == script["SOURCES"].keys()
    assert all(recording.how for recording in script["FILES"].values())


@pytest.mark.parametrize(
    ("stored", "computed", "expected"),
    [
        ({"a": [1.0, [2, 3]]}, {"a": [1.0, [2, 3.5]]}, 0.5),
        ({"a": 1}, {"b": 1}, math.inf),
        ([1, 2], [1, 2, 3], math.inf),
        (np.zeros((2, 3)), np.zeros((3, 2)), math.inf),
        (np.zeros(2), np.array([0.0, math.nan]), math.inf),
        (np.ones((2, 2), np.float32), np.ones((2, 2)), 0.0),
    ],
)
def test_the_largest_difference(script: dict[str, Any], stored: Any, computed: Any, expected: float) -> None:
    assert script["difference"](stored, computed) == expected


def test_a_folder_that_is_no_checkout(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["record"](tmp_path, write_files=False) == 2
    assert "is a checkout of neither" in capsys.readouterr().err
