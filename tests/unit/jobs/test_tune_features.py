"""The backbone of a search: the base's, or a finished run's."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raycap.jobs.tune.command import find_backbone
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import RunFolder, StageResult
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.search.spec import Search
from raycap.pipeline.storage.atomic import write_json
from tests.support.searches import small_search


def pretend_training(run: RunFolder, stages: list[str]) -> None:
    """Marks stages as done. In the backbone of stage n, the last norm's bias is n."""
    tensors = load_file(run.path / "init" / "backbone.safetensors")
    for number, stage in enumerate(stages, 1):
        best = run.stage(stage) / "best-1"
        best.mkdir(parents=True)
        tensors["swin.norm.bias"] = torch.full_like(tensors["swin.norm.bias"], float(number))
        save_file(tensors, best / "backbone.safetensors")
        save_file({}, best / "model.safetensors")
        result = StageResult(steps=1, best_step=1, best_score=1.0, kept=True, ended_early="")
        write_json(run.stage(stage) / "DONE.json", asdict(result))


def backbone_of(search: Search) -> Backbone:
    """The backbone that a trial's configuration builds."""
    weights = find_backbone(search, find_data(search.base)[0])
    assert weights is not None
    config = search.trial_config(search.space.first(), 5, weights)
    backbone = Backbone(config.backbone)
    stored = load_file(weights)
    assert all(torch.equal(stored[name], tensor) for name, tensor in backbone.state_dict().items())
    return backbone


def test_a_finished_run_gives_the_backbone(tmp_path: Path, log_lines: list[str]) -> None:
    """Every stage that trains the backbone must have ended."""
    search = small_search(tmp_path, backbone="run")
    run = prepare(search.base)
    trained = [stage.name for stage in search.base.stages if stage.train_backbone]
    pretend_training(run, trained[:1])
    with pytest.raises(UserError, match=r"no run of base\.yaml in .* has trained its backbone; train it first with"):
        backbone_of(search)
    shutil.rmtree(run.path / "stages")
    pretend_training(run, trained)
    assert backbone_of(search).swin.norm.bias[0] == len(trained) == 2
    assert f"backbone  from the run {run.run_id}" in log_lines
    assert backbone_of(small_search(tmp_path)).swin.norm.bias[0] != 2, "the base's initial backbone"
