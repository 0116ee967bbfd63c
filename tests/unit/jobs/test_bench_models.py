"""`raycap bench models`: both forms in one table, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raycap.jobs.bench.models import measure
from raycap.jobs.cli import main
from raycap.models.config import ExpansionNetConfig, ModelSizes
from raycap.models.expansionnet import ExpansionNet
from raycap.models.registry import build_model
from tests.support.models import (
    one_thread,  # noqa: F401
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_bench_compares_both_forms_and_leaves_the_model_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("raycap.jobs.bench.models.prepare_processor", lambda: None)  # it would be for all tests
    torch.manual_seed(0)
    config = ExpansionNetConfig(
        d_model=16, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, static_expansion=(4,)
    )
    model = build_model(config, ModelSizes(8, 30, 20, sos=0, eos=1, pad=2)).eval()
    assert isinstance(model, ExpansionNet)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows, errors = measure(model, 2, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [row.target for row in rows] == [4.0, 1.7, 9.0, 20.0, 9.0, 20.0]
    assert all(row.ratio > 0 for row in rows) and errors.numel() == 40
    assert sum(line.startswith("|") for line in lines) == 8 and "rows within 0.03" in lines[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert main(["bench", "models", "--images", "0"]) == 2


def test_the_bench_imports_no_cluster() -> None:
    code = (
        "import sys, raycap.jobs.bench.models\n"
        "print([m for m in ('ray', 'mlflow', 'boto3', 'pydantic', 'timm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
