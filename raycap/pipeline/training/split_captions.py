"""Captions of a split from the weights that a run delivers, computed on the training workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from raycap.models.captioner import Captioner
from raycap.models.encoders.backbone import Backbone
from raycap.models.registry import build_model
from raycap.pipeline.data.caption_files import write_predictions
from raycap.pipeline.evaluation.captioning.search import caption_images
from raycap.pipeline.evaluation.comparison.protocol import run_protocol
from raycap.pipeline.features.model_inputs import model_inputs
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runtime.context import Context
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import load_weights
from raycap.pipeline.training.stage_output import StageOutput

REPORT_EVERY_S = 30.0  # the driver must see that a long search makes progress


def caption_split(
    context: Context,
    folder: RunFolder,
    split: str,
    store: StoragePath | Path | None,
    excluded: Sequence[str],
    output: StageOutput,
) -> None:
    """Writes captions of a split from the weights that a run delivers, with the search of its section `evaluation`.

    Every rank must call it and captions its share. Rank 0 writes predictions/<split>.json. store: the features of the
    initial backbone, which images with the content keys in `excluded` lack; a trained backbone reads the images.
    output: of the run's last stage; it writes the journal, whose new entries count no training time.
    """
    prepare_processor(folder.config.workers.threads_per_worker)
    captioner = _delivered_captioner(folder).to(context.device)
    features = None
    if captioner.backbone is None:
        assert store is not None  # the frozen stages have read it
        features = open_store(store, folder.config.features)
    images = model_inputs(folder.config, folder.dataset.without(excluded).split(split), features)
    result = folder.result(output.stage)
    assert result is not None
    output.open_journal(result.steps)
    reported_at = time.monotonic()

    def report(fraction: float) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > REPORT_EVERY_S:
            reported_at = time.monotonic()
            output.log("event", result.steps, {"text": f"captions of {split}, {100 * fraction:.0f} % done"})

    protocol = run_protocol(folder.config, folder.delivered())
    output.log("event", result.steps, {"text": f"captions of {split}: {protocol.signature}"})
    best = caption_images(captioner, images, folder.vocabulary, folder.config.evaluation, context, report)
    if output.writes:
        output.check_may_write()
        path = folder.path / "predictions" / f"{split}.json"
        write_predictions(path, {image: hypothesis.caption for image, hypothesis in best.items()})
        folder.push("predictions", check_may_write=output.check_may_write)


def _delivered_captioner(folder: RunFolder) -> Captioner:
    """The captioner that a run delivers; with a backbone if a stage up to the delivered one trained it and was kept."""
    config, stage, backbone = folder.config, folder.delivered(), None
    model = build_model(config.model, folder.sizes)
    load_weights(model, folder.delivered_weights("model"))
    weights = folder.delivered_weights("backbone") if stage is not None and config.has_backbone else None
    if weights is not None and weights.parent != folder.path / "init":
        backbone = Backbone(config.backbone, with_weights=False)
        load_weights(backbone, weights)
        backbone = backbone.to(memory_format=torch.channels_last)
    return Captioner(model, backbone)
