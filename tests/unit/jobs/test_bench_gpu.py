"""The GPU benchmark's rehearsal on the CPU, on a machine without Ray, MLflow and boto3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raycap.jobs.bench_gpu import STAGES
from raycap.jobs.cli import main
from tests.conftest import ROOT

SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "mlflow", "boto3"}:
            raise ModuleNotFoundError(f"no module named {name}", name=name)

sys.meta_path.insert(0, Missing())
from pathlib import Path
from raycap.jobs.bench_gpu import bench_gpu
bench_gpu(Path(sys.argv[1]), 10, True)
"""


@pytest.mark.proof
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "rows.json")]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {(row["part"], row["precision"]) for row in rows} == {
        (part, precision)
        for part in ("training", "extraction", "decoding")
        for precision in ("float32", "tf32", "bfloat16")
    }
    assert {row["case"].split(",")[0] for row in rows if row["samples"]} >= {stage.name for stage in STAGES}
    assert all(row["seconds"] > 0 for row in rows)
    assert output.splitlines()[-1].startswith("finished in ")


def test_a_machine_without_a_gpu_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["bench", "gpu"]) == 2 and "torch sees no GPU" in capsys.readouterr().err
