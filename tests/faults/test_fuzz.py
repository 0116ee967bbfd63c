"""Hostile input of every kind is refused in one sentence, in bounded time and memory, and leaves nothing behind.

A failure prints the variables that run one case again, alone and with its traceback:
RAYCAP_FUZZ_SEED=0 RAYCAP_FUZZ_CASE=17 python -m pytest -m proof tests/faults/test_fuzz.py -k bundles
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.fuzz_targets import TARGETS
from tests.support.fuzzing import fuzz

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_refused_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, one = int(os.environ.get("RAYCAP_FUZZ_SEED", 0)), os.environ.get("RAYCAP_FUZZ_CASE")
    numbers = range(TARGETS[name].num_cases) if one is None else range(int(one), int(one) + 1)
    with capsys.disabled():
        report = fuzz(name, tmp_path, seed, numbers)
        print(report)
    assert not report.problems, str(report)
    assert len(report.results) == len(numbers)
