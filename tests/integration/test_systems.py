"""Every captioning system through all stages of the loop, in miniature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from raycap.pipeline.training.rewards.reward import CiderDReward
from tests.conftest import small_config
from tests.support.runs import FROZEN_STAGES, SMALL_MODEL, STAGES, prepare_run

SYSTEMS: list[dict[str, Any]] = [
    {"name": "transformer"},
    {"name": "meshed_memory", "num_memory_slots": 4},
    {"name": "clustformer"},
]
# the recipe of Ada-ClustFormer's published code in small
CODE_RECIPE: dict[str, Any] = {
    "name": "clustformer",
    "activation": "gelu",
    "input_dropout": 0.5,
    "cross_attention_dropout": True,
    "clustered_encoder_layers": [2],
    "stacking": "conditional",
    "decoder": "mask_token",
}


@pytest.mark.parametrize(
    "system", [pytest.param(SYSTEMS[0], marks=pytest.mark.proof), *SYSTEMS[1:]], ids=lambda system: system["name"]
)
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


def test_the_recipe_of_the_clustformers_code_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []  # the captions that rewards and validations compare with
    original = CiderDReward.__init__

    def recorded(self: CiderDReward, references: Iterable[list[str]], *others: Any, **options: Any) -> None:
        texts = list(references)
        compared.extend(text for each in texts for text in each)
        original(self, texts, *others, **options)

    monkeypatch.setattr(CiderDReward, "__init__", recorded)
    stages = [stage for stage in small_config(tmp_path)["stages"] if not stage.get("train_backbone")]
    for stage in stages:
        stage |= {"epochs": 2, "max_grad_norm": None, "max_grad_value": 0.1}
    stages[0] |= {"lr": 1e-2, "schedule": {"name": "inverse_sqrt", "warmup_iterations": 4}, "captions_per_image": 5}
    stages[0]["optimizer"] = {"name": "adam", "betas": [0.9, 0.98]}
    stages[1]["scst"] |= {"fixed_length": 9}
    words = {"data__tokenizer": "tokens", "data__vocabulary_splits": ["train", "restval", "val", "test"]}
    folder, store = prepare_run(tmp_path, model=SMALL_MODEL | CODE_RECIPE, stages=stages, **words)
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    losses = [entry["loss"] for entry in read_journal(folder.journal) if entry["kind"] == "train"]
    steps = folder.result("xe_frozen").steps
    assert len(losses) > steps > 5 and sum(losses[steps - 3 : steps]) < sum(losses[:3])
    bundle = load_bundle(bundle_run(folder))
    assert bundle.captioner.model.config == folder.config.model and bundle.vocabulary.tokenizer == "tokens"
    raw, words = set(folder.dataset.texts()), set(folder.dataset.texts("tokens"))
    assert set(compared) <= words and raw.isdisjoint(words) and compared
