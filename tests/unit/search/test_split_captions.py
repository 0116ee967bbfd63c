"""Captions of a split with the weights that a run's stages have kept."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from raycap.models.base import CaptionModel, Features
from raycap.models.captioner import build_model
from raycap.models.decoding.search import beam_search
from raycap.models.encoders.backbone import Backbone
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.images import decode_image
from raycap.pipeline.evaluation.captioning.search import score_rules
from raycap.pipeline.runs.folder import RunFolder, StageResult
from raycap.pipeline.search.trial import split_captions
from raycap.pipeline.storage.atomic import write_json
from raycap.pipeline.storage.weights import load_weights, save_weights
from raycap.pipeline.training.loop import StageJob
from tests.support.runs import prepare_run


def pretend_training(folder: RunFolder, *, kept: bool) -> tuple[CaptionModel, Backbone]:
    """Two stages with random weights: one on frozen features, and one that trains the backbone. Returns the final
    model and backbone."""
    torch.manual_seed(0)
    frozen, end_to_end = folder.config.stages[:2]
    models = []
    for stage in (frozen, end_to_end):
        model, backbone = build_model(folder.config.model, folder.metadata.sizes), Backbone(folder.config.backbone)
        if stage is frozen:
            load_weights(backbone, folder.weights_before(stage, "backbone"))
        best = folder.stage(stage.name) / "best-3"
        best.mkdir(parents=True)
        save_weights(model, best / "model.safetensors")
        if stage is end_to_end:
            save_weights(backbone, best / "backbone.safetensors")
        result = StageResult(4, 3, 0.5, kept=kept or stage is frozen, ended_early="")
        write_json(folder.stage(stage.name) / "DONE.json", asdict(result))
        models.append((model.eval(), backbone.eval()))
    return models[1 if kept else 0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_trained_backbone_that_was_kept_reads_the_images(tmp_path: Path, kept: bool) -> None:
    """The captions are those of a beam search written here over pixels. If the stage that trained the backbone was not
    kept, they are those of the features of the initial backbone."""
    folder, store = prepare_run(tmp_path)
    model, backbone = pretend_training(folder, kept=kept)
    stages = tuple(stage.name for stage in folder.config.stages[:2])
    captions = split_captions(StageJob(folder, stages, None if kept else store), "novel")
    images, settings = folder.dataset.split("novel"), folder.config.evaluation
    transform = ImageTransform(folder.config.backbone.image_size)
    assert len(captions) == len(images) == 2
    for image, uri in zip(images.column("image_id"), images.column("uri"), strict=True):
        pixels = transform(decode_image(Path(uri).read_bytes(), 10**6))
        with torch.inference_mode():
            features = backbone(pixels[None])
            features = features if kept else features.half().float()  # as the store has them
            memory = model.encode(Features(features))
            rules = score_rules(settings, folder.vocabulary)
            found = beam_search(
                model, memory, beam_size=settings.beam_size, max_length=settings.max_length, rules=rules
            )
        assert captions[image] == folder.vocabulary.decode(found.tokens[0, 0].tolist())
