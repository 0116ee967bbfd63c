"""Training, captioning and bundles on region features: every model gets their lengths and boxes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycap.jobs.cli import main
from raycap.jobs.retrain import RayWork
from raycap.models.base import Features
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests, load_bundle
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.features.store.store import FeatureStore
from raycap.pipeline.runs.run_bundle import bundle_run
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.training.batches import Batches, CaptionTokens
from raycap.pipeline.training.dry_run import dry_run
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.conftest import small_config
from tests.support.captioning import Captioning
from tests.support.features import positions
from tests.support.runs import FROZEN_STAGES, MESHED_MEMORY, SMALL_MODEL, prepare_region_run

CLUSTERED = {"name": "clustformer", "inputs": "regions", "sampling": 1, "region_rows": 2}
EXPANSION = {"name": "expansionnet_v2", "static_expansion": [4], "dynamic_expansion": 2}


@pytest.mark.parametrize("system", [MESHED_MEMORY, CLUSTERED, EXPANSION], ids=lambda system: system["name"])
def test_a_system_trains_validates_and_captions_on_regions(tmp_path: Path, system: dict[str, Any]) -> None:
    folder, store = prepare_region_run(tmp_path, system)
    assert folder.metadata.num_tokens == 4 and folder.metadata.parameters["backbone"] == 0
    assert all(result.error is None for result in dry_run(folder))
    train_stages(LocalContext("cpu"), StageJob(folder, FROZEN_STAGES, store))
    for name in FROZEN_STAGES:
        result = folder.result(name)
        assert result is not None and math.isfinite(result.best_score)
    path = bundle_run(folder)
    bundle = load_bundle(path)
    assert bundle.captioner.backbone is None and bundle.transform is None
    part = folder.dataset.split("test")
    images = Images(part, FeatureStore(store), None, 10**6, 1)
    captions = caption_images(
        bundle.captioner, images, bundle.vocabulary, folder.config.evaluation, LocalContext("cpu")
    )
    assert list(captions) == part.column("image_id")


@pytest.mark.parametrize("system", [MESHED_MEMORY, CLUSTERED], ids=lambda system: system["name"])
@pytest.mark.parametrize("stage", FROZEN_STAGES)
def test_lengths_and_boxes_reach_both_objectives(tmp_path: Path, system: dict[str, Any], stage: str) -> None:
    """What pads a row changes nothing; other lengths do, and other boxes for the model that arranges by them."""
    folder, store = prepare_region_run(tmp_path, system)
    run = StageRun(LocalContext("cpu"), folder, folder.config.stage(stage), StageJob(folder, FROZEN_STAGES, store))
    (batch,) = run.batches.at(0)
    features = batch.features
    assert features.lengths is not None and features.boxes is not None
    assert set(features.lengths.tolist()) <= {2, 3} and len(set(features.lengths.tolist())) == 2

    def gradient(features: Features) -> torch.Tensor:
        given = replace(batch, features=features)
        run.captioner.zero_grad()
        run.captioner.train()
        loss = run.objective(run.captioner, run.captioner, given, torch.Generator().manual_seed(0)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return torch.cat([each.grad.flatten() for each in run.captioner.parameters() if each.grad is not None])

    padding = torch.arange(4) >= features.lengths[:, None]
    other = Features(
        features.tokens.masked_fill(padding[..., None], 7.0),
        features.lengths,
        features.boxes.masked_fill(padding[..., None], 9.0),
    )
    own = gradient(features)
    assert torch.allclose(own, gradient(other), atol=1e-6)
    assert not torch.allclose(own, gradient(replace(other, lengths=torch.full_like(features.lengths, 4))), atol=1e-4)
    if system is CLUSTERED:
        assert not torch.allclose(own, gradient(replace(features, boxes=features.boxes.flip(1))), atol=1e-5)


def test_captions_do_not_depend_on_padding(tmp_path: Path) -> None:
    """The same regions with room for 3 and for 9 give the same captions and scores."""
    found = []
    for most in (3, 9):
        folder, _ = prepare_region_run(tmp_path, CLUSTERED)
        config = folder.config.model_copy(
            update={"features": folder.config.features.model_copy(update={"max_regions": most})}
        )
        store, _ = import_regions(folder.dataset, config)
        run = StageRun(LocalContext("cpu"), folder, config.stage("xe_frozen"), StageJob(folder, FROZEN_STAGES, store))
        captioned = caption_images(run.captioner, run.validation, run.vocabulary, config.evaluation, run.context)
        found.append({image: hypothesis.caption for image, hypothesis in captioned.items()})
    assert found[0] == found[1] and found[0]


def test_a_batch_carries_the_regions_of_its_images(tmp_path: Path) -> None:
    folder, store = prepare_region_run(tmp_path, MESHED_MEMORY)
    train = folder.dataset.split("train")
    images = Images(train, FeatureStore(store), None, 10**6, 1)
    batches = Batches(
        images,
        CaptionTokens.of_stage(folder, folder.config.stages[0], train),
        folder.config.stages[0],
        seed=1,
        rank=0,
        world_size=1,
    )
    (batch,) = batches.at(3)
    whole = FeatureStore(store)
    expected = whole.regions_at(positions(whole, [train.column("key")[row] for row in batch.images.tolist()]))
    for values, expected_values in zip((batch.features.lengths, batch.features.boxes), expected, strict=True):
        assert values is not None and expected_values is not None and np.array_equal(values.numpy(), expected_values)


def test_a_bundle_of_regions_captions_no_image_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = prepare_region_run(tmp_path, MESHED_MEMORY)
    picture = folder.dataset.column("uri")[0]
    capsys.readouterr()
    assert main(["caption", picture, "--model", str(bundle_run(folder))]) == 2
    message = capsys.readouterr().err.strip()
    assert "region features" in message and "raycap evaluate" in message and "\n" not in message


def test_retraining_captions_the_held_out_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycap.pipeline.evaluation.evaluate.start_ray", lambda *_: None)
    monkeypatch.setattr("raycap.pipeline.evaluation.evaluate.caption_on_cluster", Captioning())
    folder, _ = prepare_region_run(tmp_path, MESHED_MEMORY, workers__num_workers=1)
    bundle, part = bundle_run(folder), folder.dataset.split("test")
    scores = RayWork(None).evaluate(storage_path(bundle), bundle_digests(bundle), part, folder.config)
    assert sorted(scores.captions) == sorted(part.column("image_id")) and all(scores.captions.values())
    assert scores.values["CIDEr-D"] is not None
    with pytest.raises(OSError, match="is not what it was when it was written"):
        RayWork(None).evaluate(storage_path(bundle), {"model.safetensors": "0"}, part, folder.config)


def test_a_trial_of_a_search_over_memory_slots(tmp_path: Path) -> None:
    """A search on region features has no backbone; its trials read the store that the import filled."""
    from raycap.jobs.tune.features import extract_once, find_backbone
    from raycap.pipeline.data.reading import find_data
    from raycap.pipeline.search.spec import Search, SearchConfig
    from raycap.pipeline.search.trial import TrialTask, run_trial
    from raycap.pipeline.search.trials import SearchPlan

    values = small_config(tmp_path, model=SMALL_MODEL | MESHED_MEMORY)
    values["features"] = {"hdf5": "synthetic", "max_regions": 3}
    del values["backbone"]
    values["stages"] = values["stages"][:1]
    section = {"name": "slots", "base": "base.yaml", "space": {"model.num_memory_slots": [0, 2]}, "algorithm": "grid"}
    section |= {"objectives": {"CIDEr-D": "max", "macs_executed": "min", "latency_ms": "min"}}
    search = Search(SearchConfig.model_validate(section), values)
    dataset, _ = find_data(search.base)
    assert find_backbone(search, dataset, None) is None
    store, bad = extract_once(search, dataset, None, lambda: None)
    assert store is not None and not bad
    plan = SearchPlan(search, None, None, store, bad)
    outcomes = [run_trial(TrialTask(plan, point, 0), lambda values: None) for point in search.space.points()]
    assert [outcome.state for outcome in outcomes] == ["finished", "finished"], outcomes
    costs = [outcome.costs or {} for outcome in outcomes]
    assert "macs" not in costs[0] and costs[0]["macs_executed"] < costs[1]["macs_executed"]
    assert costs[0]["parameters"] < costs[1]["parameters"] and costs[0]["latency_ms"] > 0
