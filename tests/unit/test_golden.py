"""The script beside the golden files: it knows the source of each, and notices every difference."""

from __future__ import annotations

import runpy
from typing import Any

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
