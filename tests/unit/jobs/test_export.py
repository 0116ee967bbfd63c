"""`raycap export`: its output, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.jobs.cli import main
from raycap.models.convert.export_graphs import EncoderGraph
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests, load_bundle
from raycap.pipeline.serving.export import torch_program
from tests.conftest import ROOT
from tests.support.bundles import make_bundle


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, out = make_bundle(tmp_path / "bundle"), tmp_path / "new" / "out"
    assert main(["export", str(bundle), "-o", str(out), "--format", "torch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"The captioner: {out}"
    assert lines[-2].startswith("the graphs differ from the model by up to ")
    content = json.loads((out / "captioner.json").read_text())
    assert content["source"] == bundle_digests(bundle, ("model.safetensors", "vocabulary.json"))
    assert content["graphs"] == "torch" and content["opset"] is None and content["name"] == "small"
    assert str(ROOT).encode() not in (out / "decoder.pt2").read_bytes(), "the exporter records where it was called"
    images = torch.randn(17, 3, 32, 32)
    (first, *_) = torch_program(out / "encoder.pt2")([images.numpy()])
    expected = EncoderGraph(load_bundle(bundle).captioner)(images)[0]
    torch.testing.assert_close(torch.from_numpy(first), expected, atol=1e-5, rtol=1e-5)
    assert main(["export", str(bundle), "-o", str(out)]) == 2
    assert f"--out {out} exists and is not empty" in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    assert main(["export", "bundle", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--format onnx needs the package onnxscript" in said and "`export`" in said
