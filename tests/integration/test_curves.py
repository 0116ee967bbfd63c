"""Losses, captions and scores of small runs on the CPU, as they were recorded with RESULTS_VERSION.

A refactor must not change them. After a change that is meant to change them, raise RESULTS_VERSION, and record them
again by `python -m tests.integration.test_curves`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.evaluation.scores.metrics import score_captions
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.identity import RESULTS_VERSION
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.search.trial import split_captions
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL, prepare_run

CURVES, CAPTIONS = (Path(__file__).with_name(name) for name in ("curves.json", "captions.json"))
STEPS = 30
METRICS = ("BLEU-4", "ROUGE-L", "CIDEr-D")
SYSTEMS: dict[str, dict[str, Any]] = {
    "expansionnet_v2": {"name": "expansionnet_v2", "static_expansion": [4], "dynamic_expansion": 2},
    "transformer": {"name": "transformer"},
    "meshed_memory": MESHED_MEMORY,
    "clustformer": {"name": "clustformer"},
}
CHANGED = (
    "{} have changed. If they should, raise RESULTS_VERSION in raycap/pipeline/runs/identity.py and run "
    "`python -m tests.integration.test_curves` to record them again."
)


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


def captions_of(storage: Path, system: str) -> tuple[RunFolder, dict[str, str]]:
    """A run of a system on features, and its captions of the test split after 20 epochs of cross entropy.

    It trains in float64, so that processors differ by little after some hundred steps.
    """
    stage = small_config(storage)["stages"][0] | {"epochs": 20, "validate_every_epochs": 100, "lr": 5e-3}
    stage |= {"precision": "float64", "schedule": {"warmup_iterations": 1}, "checkpoint_every_steps": 1000}
    folder, store = prepare_run(storage, model=SMALL_MODEL | SYSTEMS[system], stages=[stage])
    job = StageJob(folder, (stage["name"],), store)
    train_stages(LocalContext("cpu"), job)
    return folder, {str(image): caption for image, caption in split_captions(job, "test").items()}


def scores_of(folder: RunFolder, captions: dict[str, str]) -> dict[str, float | None]:
    """The scores of captions of the test split by metric."""
    references = {str(image): texts for image, texts in folder.dataset.split("test").references().items()}
    scores = score_captions(references, captions, metrics=METRICS).by_name
    return {name: scores[name].value for name in METRICS}


def are_equal(found: dict[str, list[float]], recorded: dict[str, list[float]]) -> bool:
    """Whether the losses are the recorded ones, within the differences between processors."""
    # Matrix products differ in their last digits between processors; a changed rule differs far more.
    return found.keys() == recorded.keys() and all(
        found[stage] == pytest.approx(losses, rel=2e-3, abs=2e-3) for stage, losses in recorded.items()
    )


def test_the_losses_belong_to_the_results_version(tmp_path: Path) -> None:
    recorded, found = json.loads(CURVES.read_text()), curves(tmp_path)
    assert recorded.pop("results_version") == RESULTS_VERSION, "record the losses of this RESULTS_VERSION again"
    assert all(len(losses) == STEPS for losses in recorded.values())
    assert are_equal(found, recorded), CHANGED.format("The losses")


@pytest.mark.parametrize("system", SYSTEMS)
def test_captions_and_scores_belong_to_the_results_version(tmp_path: Path, system: str) -> None:
    """At most one caption may differ from the recorded ones, because other processors decide near ties otherwise.

    The scores of the recorded captions are equal."""
    recorded = json.loads(CAPTIONS.read_text())
    assert recorded.pop("results_version") == RESULTS_VERSION, "record the captions of this RESULTS_VERSION again"
    folder, found = captions_of(tmp_path, system)
    expected = recorded[system]["captions"]
    assert found.keys() == expected.keys()
    differing = [image for image, caption in found.items() if caption != expected[image]]
    assert len(differing) <= 1, CHANGED.format("The captions")
    assert scores_of(folder, expected) == recorded[system]["scores"], CHANGED.format("The scores")


def record() -> None:
    """Writes the losses, captions and scores of this version."""
    before = json.loads(CURVES.read_text())
    captions: dict[str, Any] = {"results_version": RESULTS_VERSION}
    with tempfile.TemporaryDirectory() as scratch:
        found = curves(Path(scratch) / "curves")
        for system in SYSTEMS:
            folder, texts = captions_of(Path(scratch) / system, system)
            captions[system] = {"captions": texts, "scores": scores_of(folder, texts)}
    version = before.pop("results_version")
    if version == RESULTS_VERSION and not are_equal(found, before):
        sys.exit("the losses have changed; raise RESULTS_VERSION in raycap/pipeline/runs/identity.py first")
    CAPTIONS.write_text(json.dumps(captions, indent=1) + "\n")
    if version != RESULTS_VERSION:
        CURVES.write_text(json.dumps({"results_version": RESULTS_VERSION} | found, indent=1))


if __name__ == "__main__":
    record()
