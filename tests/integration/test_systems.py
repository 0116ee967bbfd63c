"""Every captioning system through all stages of the loop, in miniature."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline.captioning.bundle import load_bundle
from pipeline.runs.journal import read_journal
from pipeline.runs.run_bundle import bundle_run
from pipeline.runtime.context import LocalContext
from pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import SMALL_MODEL, STAGES, prepare_run

SYSTEMS: list[dict[str, Any]] = [
    {"name": "transformer"},
    {"name": "meshed_memory", "num_memory_slots": 4},
    {"name": "clustformer"},
]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system["name"])
def test_a_system_goes_through_every_stage(tmp_path: Path, system: dict[str, Any]) -> None:
    stages = small_config(tmp_path)["stages"]
    for stage in stages[:2]:  # enough to see the loss fall
        stage |= {"epochs": 2, "lr": 5e-3, "schedule": {"warmup_iterations": 1}}
    folder, store = prepare_run(tmp_path, model=SMALL_MODEL | system, stages=stages)
    train_stages(LocalContext("cpu"), StageJob(folder, STAGES, store))
    journal = read_journal(folder.journal)
    for stage in STAGES:
        result = folder.result(stage)
        assert result is not None and result.steps > 1 and math.isfinite(result.best_score)
    losses = [entry["loss"] for entry in journal if entry["stage"] in STAGES[:2] and entry["kind"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3])
    bundle = load_bundle(bundle_run(folder))
    assert bundle.captioner.model.config.name == system["name"]
    if system["name"] != "transformer":  # which takes the expansions' settings as null
        assert bundle.captioner.model.config == folder.config.model
