"""`raycap export`: its output, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.cli import main
from tests.support.bundles import make_bundle


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, out = make_bundle(tmp_path / "bundle", backbone=False), tmp_path / "new" / "out"
    assert main(["export", str(bundle), "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"The captioner: {out}"
    assert lines[-2].startswith("the graphs differ from the model by up to ")
    content = json.loads((out / "captioner.json").read_text())
    assert content["opset"] == 20 and content["name"] == "small"
    assert main(["export", str(bundle), "-o", str(out)]) == 2
    assert f"--out {out} exists and is not empty" in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    assert main(["export", "bundle", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "`raycap export` needs the package onnxscript" in said and "`export`" in said
