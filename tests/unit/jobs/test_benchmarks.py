"""Each benchmark of `benchmarks/` runs at a small size and prints its result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.bundles import make_bundle

pytestmark = pytest.mark.proof


def benchmark(name: str, *options: str) -> str:
    """The output of a benchmark that runs as a script."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=900).stdout


@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [
        ("models", "--images 1 --repeats 1", "rows within 0.03"),
        ("train", "--repeats 1", "5 captions per image over pairs"),
        ("reward", "", "largest difference"),
        ("metrics", "--images 200 --repeats 1", "largest difference"),
        ("extract", "--count 32 --image-size 64 --batch-size 8", "ratio"),
    ],
)
def test_a_benchmark_prints_its_result(name: str, options: str, printed: str) -> None:
    assert printed in benchmark(name, *options.split())


def test_the_serving_benchmark_answers_requests(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    lines = benchmark("serve", "--model", str(bundle), "--requests", "10", "--clients", "2").splitlines()
    assert any(line.split()[:1] == ["2"] for line in lines)  # Ray may print lines at its end
