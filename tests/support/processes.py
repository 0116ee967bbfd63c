"""`raycap run` in a process of its own, and the weights that it writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import ROOT


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def start(config: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "jobs", "run", str(config), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    return output


def weights(storage: Path, stages: Sequence[str]) -> dict[str, torch.Tensor]:
    found = {}
    for stage in stages:
        for path in storage.glob(f"runs/*/stages/{stage}/best-*/*.safetensors"):
            found |= {f"{stage}/{path.name}/{key}": value for key, value in load_file(path).items()}
    return found
