"""`raycap export`, and exported graphs of every system: their results, their captions, and the folder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycap.jobs.cli import main
from raycap.models.base import Features
from raycap.models.convert.export_graphs import EncoderGraph, StepGraph
from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.serving.export import compare_graphs, export_captioner, onnx_graph
from raycap_onnx import Caption, Captioner
from tests.conftest import ROOT
from tests.support.bundles import make_bundle
from tests.support.exports import (
    SYSTEMS,
    Export,
    make_captioner_bundle,
    make_images,
    torch_captions,
)

NUM_IMAGES = 18
QUICK = "expansionnet"  # `make proof` exports the others


def captions_of(folder: Path, name: str, batch_size: int, **search: Any) -> tuple[list[Caption], Features]:
    """The exported captioner's captions, and the same inputs for the model."""
    captioner, bundle = Captioner(folder, threads=1), make_captioner_bundle(name)
    assert bundle.transform is not None
    images = make_images(NUM_IMAGES)
    pixels = torch.stack([bundle.transform(image) for image in images])
    return captioner.caption(images, batch_size=batch_size, **search), Features(pixels)


def assert_equal(ours: list[Caption], theirs: list[Caption]) -> None:
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    assert [each.text for each in ours] == [each.text for each in theirs]
    np.testing.assert_allclose([each.log_prob for each in ours], [each.log_prob for each in theirs], atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.proof] * (name != QUICK)) for name in SYSTEMS])
def test_graphs_and_captions_are_those_of_the_model(name: str, exported: Export) -> None:
    folder, difference = exported(name)
    assert 0 <= difference < 1e-4
    bundle = make_captioner_bundle(name)
    for batch_size in (1, 2, 17):
        ours, inputs = captions_of(folder, name, batch_size)
        assert_equal(ours, torch_captions(bundle, inputs, batch_size))
    assert len({each.tokens for each in ours}) > 3
    # all captions of the random Transformer have the greatest length
    assert name == "transformer" or len({len(each.tokens) for each in ours}) > 1
    greedy, inputs = captions_of(folder, name, 7, beam_size=1, max_length=6)
    change = {"beam_size": 1, "max_length": 6}
    assert_equal(greedy, torch_captions(bundle, inputs, 7, lambda search: search.model_copy(update=change)))
    assert greedy != ours and max(len(each.tokens) for each in greedy) <= 6


def test_the_folder_is_described(exported: Export) -> None:
    folder, _ = exported(QUICK)
    content = json.loads((folder / "captioner.json").read_text())
    files = {path.name for path in folder.iterdir()}
    assert files == {"captioner.json", "vocabulary.json", "encoder.onnx", "decoder.onnx"}
    assert content["files"].keys() == files - {"captioner.json"}
    for name, digest in content["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for path in folder.iterdir():
        assert str(ROOT).encode() not in path.read_bytes(), "the exporter records where it was called"
    assert content["opset"] == 20 and content["system"] == "expansionnet_v2"
    assert (content["search"]["beam_size"], content["search"]["max_length"]) == (3, 12)


def test_graphs_that_differ_are_not_written(exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter writes the graphs of other weights than the model's."""
    folder, _ = exported(QUICK)
    exporter = "raycap.pipeline.serving.export.write_graph"
    monkeypatch.setattr(exporter, lambda path, *_: shutil.copy(folder / path.name, path))
    bundle = make_captioner_bundle(QUICK)
    with torch.no_grad():
        for parameter in bundle.captioner.parameters():
            parameter.mul_(1.5)
    with pytest.raises(JobFailedError, match=r"differ from the model by up to .*; nothing was written"):
        export_captioner(bundle, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.proof
def test_weights_beyond_the_limit_of_a_graph_are_in_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycap.pipeline.serving.export.MAX_EMBEDDED_BYTES", 2**10)
    bundle = make_captioner_bundle("meshed memory")
    export_captioner(bundle, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"encoder.onnx.data", "decoder.onnx.data"}
    files = json.loads((tmp_path / "out" / "captioner.json").read_text())["files"]
    assert "encoder.onnx.data" in files
    found, inputs = captions_of(tmp_path / "out", "meshed memory", 9)
    assert_equal(found, torch_captions(bundle, inputs, 9))


def test_the_comparison_sees_a_wrong_cache(exported: Export) -> None:
    """A cache of zeros gives other numbers from the second step on."""
    folder, _ = exported(QUICK)
    captioner = make_captioner_bundle(QUICK).captioner
    encoder = EncoderGraph(captioner)
    step = StepGraph(encoder)
    graphs = [onnx_graph(folder / f"{name}.onnx") for name in ("encoder", "decoder")]
    assert compare_graphs(encoder, step, graphs) < 1e-4

    def forget(inputs: Any) -> list[np.ndarray]:
        log_probs, *cache = graphs[1](inputs)
        return [log_probs, *map(np.zeros_like, cache)]

    assert compare_graphs(encoder, step, [graphs[0], forget]) > 1e-2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, out = make_bundle(tmp_path / "bundle"), tmp_path / "new" / "out"
    assert main(["export", str(bundle), "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"The captioner: {out}"
    assert lines[-2].startswith("the graphs differ from the model by up to ")
    content = json.loads((out / "captioner.json").read_text())
    assert content["opset"] == 20 and content["name"] == "small"
    assert main(["export", str(bundle), "-o", str(out)]) == 2
    assert f"--out {out} exists and is not empty" in capsys.readouterr().err
    regions = make_bundle(tmp_path / "regions", backbone=False)
    assert main(["export", str(regions), "-o", str(tmp_path / "other")]) == 2
    assert "BUNDLE: this bundle has no backbone" in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    assert main(["export", "bundle", "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "`raycap export` needs the package onnxscript" in said and "`export`" in said
