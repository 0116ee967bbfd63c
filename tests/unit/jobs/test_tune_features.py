"""The backbone of a search: the base's, a finished run's, a stand-in's, or a file's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raycap.jobs.tune.features import find_backbone
from raycap.models.encoders.backbone import Backbone
from raycap.pipeline.data.reading import find_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import RunFolder, StageResult
from raycap.pipeline.runs.prepare import prepare
from raycap.pipeline.search.spec import Search
from raycap.pipeline.storage.atomic import write_json
from tests.support.logs import on_message
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


def backbone_of(search: Search) -> tuple[Backbone, list[str]]:
    """The backbone that a trial's configuration builds, and the log messages."""
    messages: list[str] = []
    with on_message(messages.append):
        dataset, _ = find_data(search.base)
        source = find_backbone(search, dataset, None)
    config = search.trial_config(search.space.first(), 5, str(source.start))
    backbone = Backbone(config.backbone)
    stored = load_file(source.weights)
    assert all(torch.equal(stored[name], tensor) for name, tensor in backbone.state_dict().items())
    return backbone, messages


def test_a_finished_run_gives_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This needs the end of every stage that trains the backbone. Before, a stand-in is trained."""
    search = small_search(tmp_path, backbone={"weights": "run", "set": {"stages.xe_finetune.epochs": 2}})
    run = prepare(search.base)
    trained = [stage.name for stage in search.base.stages if stage.train_backbone]
    pretend_training(run, trained[:1])

    trained_stages = []

    def train(config, address):  # type: ignore[no-untyped-def]
        trained_stages.append([(stage.name, stage.epochs) for stage in config.stages])
        stand_in = prepare(config)
        pretend_training(stand_in, ["xe_frozen", "xe_finetune"])
        return stand_in

    monkeypatch.setattr("raycap.jobs.tune.features.train", train)
    backbone, messages = backbone_of(search)
    assert trained_stages == [[("xe_frozen", 0.7), ("xe_finetune", 2.0)]]
    assert "a stand-in is trained now" in messages[-1]
    assert backbone.swin.norm.bias[0] == 2
    _, messages = backbone_of(search)
    assert len(trained_stages) == 1 and "a stand-in exists" in messages[-1]

    (run.stage(trained[0]) / "DONE.json").unlink()
    for path in run.stage(trained[0]).glob("best-*/*"):
        path.unlink()
    (run.stage(trained[0]) / "best-1").rmdir()
    pretend_training(run, trained)
    backbone, messages = backbone_of(search)
    assert f"from the finished run {run.run_id}" in messages[-1] and backbone.swin.norm.bias[0] == len(trained)


def test_invalid_backbones_are_refused(tmp_path: Path) -> None:
    for section, words in (
        ({"weights": "run", "stages": ["nothere"]}, "has no 'nothere'"),
        ({"weights": "run", "stages": ["xe_frozen"]}, "none of xe_frozen trains the backbone"),
        ({"weights": str(tmp_path / "absent.pth")}, "is no file"),
    ):
        with pytest.raises(UserError, match=words):
            backbone_of(small_search(tmp_path, backbone=section))
