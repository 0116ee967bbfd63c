"""Training on images inside tars and Parquet ends with the weights of training on files."""

from __future__ import annotations

from pathlib import Path

from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.forms import FORMS, scenes
from tests.support.runs import assert_same_weights, best_weights, prepare_run

TRAINED = ("xe_frozen", "xe_finetune")


def test_weights_do_not_depend_on_the_form(tmp_path: Path) -> None:
    images = scenes(tmp_path / "scenes")
    weights = {}
    for form in ("karpathy", "parquet", "webdataset"):
        keys = FORMS[form](tmp_path / form, images)
        data = {"root": str(tmp_path / form), "train_splits": ["train"], "min_count": 1, **keys}
        storage = tmp_path / f"results-{form}"
        stages = [stage for stage in small_config(storage)["stages"] if stage["name"] in TRAINED]
        folder, store = prepare_run(storage, data=data, stages=stages)
        train_stages(LocalContext("cpu"), StageJob(folder, TRAINED, store))
        weights[form] = {stage: best_weights(folder.stage(stage)) for stage in TRAINED}
    for stages_weights in weights.values():
        for stage in TRAINED:
            assert_same_weights(stages_weights[stage], weights["karpathy"][stage])
