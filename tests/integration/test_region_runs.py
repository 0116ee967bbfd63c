"""Training, captioning and bundles on region features: every model gets their lengths and boxes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycap.jobs.retrain import RayWork
from raycap.models.base import Features
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests, load_bundle
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.features.model_inputs import Images
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.runtime.context import LocalContext
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.training.dry_run import dry_run
from raycap.pipeline.training.loop import StageJob, StageRun, train_stages
from tests.support.runs import FROZEN_STAGES, MESHED_MEMORY, prepare_region_run

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
    images = Images(part, FeatureStore(store), 10**6, 1)
    captions = caption_images(
        bundle.captioner, images, bundle.vocabulary, folder.config.evaluation, LocalContext("cpu")
    )
    assert list(captions) == part.column("image_id")


@pytest.mark.parametrize("system", [MESHED_MEMORY, CLUSTERED], ids=lambda system: system["name"])
@pytest.mark.parametrize("stage", FROZEN_STAGES)
def test_lengths_and_boxes_reach_both_objectives(tmp_path: Path, system: dict[str, Any], stage: str) -> None:
    """Padding changes no gradient, and other lengths do. Other boxes do if the model arranges regions by them."""
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


def test_retraining_captions_the_held_out_regions(tmp_path: Path, without_ray: None) -> None:
    folder, _ = prepare_region_run(tmp_path, MESHED_MEMORY, workers__num_workers=1)
    bundle, part = bundle_run(folder), folder.dataset.split("test")
    scores = RayWork(None).evaluate(storage_path(bundle), bundle_digests(bundle), part, folder.config)
    assert sorted(scores.captions) == sorted(part.column("image_id")) and all(scores.captions.values())
    assert scores.values["CIDEr-D"] is not None
    with pytest.raises(OSError, match="is missing or has changed"):
        RayWork(None).evaluate(storage_path(bundle), {"model.safetensors": "0"}, part, folder.config)
