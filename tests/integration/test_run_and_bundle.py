"""A run and the bundle that it delivers have the same scores, confidence and extras, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycap.jobs.evaluate import evaluate
from raycap.jobs.run import run
from raycap.pipeline.config.load import load_config
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runs.delivery import bundle_place
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.training.loop import StageJob, train_stages
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL, with_features, write_config

SYSTEMS: list[dict[str, Any]] = [
    {"name": "expansionnet_v2", "static_expansion": [4], "dynamic_expansion": 2},
    {"name": "transformer"},
    MESHED_MEMORY,
    {"name": "clustformer"},
]
QUICK = [(0, "never"), (2, "always")]  # `make proof` tests the others


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captions of even images are good, so that a confidence can be fitted on few of them."""
    evaluator = "raycap.pipeline.evaluation"
    monkeypatch.setattr(f"{evaluator}.confidence.MIN_IMAGES", 4)
    monkeypatch.setattr(
        f"{evaluator}.evaluate.main_object_hits", lambda captions, *_: {image: image % 2 == 0 for image in captions}
    )


@pytest.mark.ray
@pytest.mark.parametrize(
    ("system", "store"),
    [
        pytest.param(system, store, marks=[pytest.mark.proof] * ((number, store) not in QUICK))
        for number, system in enumerate(SYSTEMS)
        for store in ("always", "never")
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_a_run_and_its_bundle_have_equal_scores(
    tmp_path: Path, ray_session: None, system: dict[str, Any], store: str
) -> None:
    stages = [{**small_config(tmp_path)["stages"][0], "epochs": 3, "lr": 5e-3}]
    values = small_config(tmp_path / "results", model=SMALL_MODEL | system, stages=stages)
    values["features"] = {"store": store, "stored_dtype": "float16", "compute_dtype": "float32"}
    file = write_config(tmp_path / "run.yaml", values)
    folder, features = with_features(load_config(file))
    train_stages(LocalContext("cpu"), StageJob(folder, (stages[0]["name"],), features))
    run(load_config(file))
    own = json.loads((folder.path / "scores.json").read_text())
    bundle = bundle_place(folder)
    (confidence,), content = load_bundle(bundle.path).confidences, (bundle / "confidence.json").read_bytes()
    assert own["splits"]["test"]["confidence"]
    assert own["splits"]["test"]["scores"]["CIDEr-D"] > 0 and confidence.num_images == own["splits"]["val"]["images"]
    count = len(FeatureStore(features))
    for name, models in (("of-run", None), ("of-bundle", [str(bundle)])):
        assert evaluate(file, splits=[*own["splits"]], models=models, out=str(tmp_path / name)) == 0
        evaluated = json.loads((tmp_path / name / "scores.json").read_text())
        assert evaluated["splits"] == own["splits"] and evaluated["signature"] == own["signature"]
        for split in own["splits"]:
            names = folder.path / "predictions" / f"n-best-{split}.jsonl", tmp_path / name / f"n-best-{split}.jsonl"
            assert names[0].read_bytes() == names[1].read_bytes(), "log-probabilities and signals"
    assert (bundle / "confidence.json").read_bytes() == content
    assert len(FeatureStore(features)) == count, "all read the features that the run has stored"
    assert [path.name for path in (tmp_path / "results" / "features").iterdir()] == [features.name]
