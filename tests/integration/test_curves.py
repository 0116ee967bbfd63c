"""Loss curves of 30 steps of each objective on the CPU, as they were recorded: a refactor must not change them.

Recorded again, after a change that is meant to change them, by `python -m tests.integration.test_curves`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import prepare_run

RECORDED = Path(__file__).with_name("curves.json")
STEPS = 30


def curves(storage: Path) -> dict[str, list[float]]:
    """Losses by step of a cross-entropy and an SCST stage of 30 steps each, from features."""
    stages = [stage for stage in small_config(storage)["stages"] if not stage.get("train_backbone")]
    for stage in stages:
        stage |= {"epochs": STEPS * stage["batch_size"] / 48, "validate_every_epochs": 100}
    folder, store = prepare_run(storage, stages=stages)
    train_stages(LocalContext("cpu"), StageJob(folder, tuple(stage["name"] for stage in stages), store))
    found: dict[str, list[float]] = {}
    for entry in read_journal(folder.journal):
        if entry["kind"] == "train":
            found.setdefault(entry["stage"], []).append(round(entry["loss"], 6))
    return found


def test_loss_curves_are_as_recorded(tmp_path: Path) -> None:
    recorded, found = json.loads(RECORDED.read_text()), curves(tmp_path)
    assert found.keys() == recorded.keys()
    for stage, losses in recorded.items():
        assert len(losses) == STEPS
        # Matrix products differ in their last digits between processors; a changed rule differs far more.
        assert found[stage] == pytest.approx(losses, rel=2e-3, abs=2e-3), stage


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORDED.write_text(json.dumps(curves(Path(folder)), indent=1))
    sys.exit(0)
