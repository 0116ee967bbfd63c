"""Loss curves of 30 steps of each objective on the CPU, as they were recorded with RESULTS_VERSION.

A refactor must not change them. After a change that is meant to change them, raise RESULTS_VERSION, and record them
again by `python -m tests.integration.test_curves`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from raycap.pipeline.runs.identity import RESULTS_VERSION
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


def are_equal(found: dict[str, list[float]], recorded: dict[str, list[float]]) -> bool:
    """Whether the losses are the recorded ones, within the differences between processors."""
    # Matrix products differ in their last digits between processors; a changed rule differs far more.
    return found.keys() == recorded.keys() and all(
        found[stage] == pytest.approx(losses, rel=2e-3, abs=2e-3) for stage, losses in recorded.items()
    )


def test_the_losses_belong_to_the_results_version(tmp_path: Path) -> None:
    recorded, found = json.loads(RECORDED.read_text()), curves(tmp_path)
    version = recorded.pop("results_version")
    assert all(len(losses) == STEPS for losses in recorded.values())
    assert are_equal(found, recorded), (
        "The losses have changed. If they should, raise RESULTS_VERSION in raycap/pipeline/runs/identity.py and run "
        "`python -m tests.integration.test_curves` to record them again."
    )
    assert version == RESULTS_VERSION, (
        "RESULTS_VERSION was raised; run `python -m tests.integration.test_curves` to record the losses again."
    )


def record() -> None:
    """Writes the losses of this version."""
    before = json.loads(RECORDED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        found = curves(Path(folder))
    if before.pop("results_version") == RESULTS_VERSION and not are_equal(found, before):
        sys.exit("the losses have changed; raise RESULTS_VERSION in raycap/pipeline/runs/identity.py first")
    RECORDED.write_text(json.dumps({"results_version": RESULTS_VERSION} | found, indent=1))


if __name__ == "__main__":
    record()
