"""Teachers for tests: bundles whose captions differ from image to image and end, and stored captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raycap.models.captioner import Captioner
from raycap.models.encoders.backbone import Backbone
from raycap.models.registry import build_model
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.evaluation.captioning.bundle import save_bundle
from raycap.pipeline.evaluation.comparison.protocol import run_protocol
from raycap.pipeline.runs.distillation.caption_store import CaptionStore, caption_store, images_to_caption
from raycap.pipeline.runs.distillation.teacher import find_teacher
from raycap.pipeline.runs.prepare import prepare
from tests.conftest import small_config
from tests.support.runs import MESHED_MEMORY, SMALL_MODEL


def make_teacher(bundle: Path, values: Mapping[str, Any], seed: int = 1) -> Path:
    """A bundle with random weights. Its words, inputs and sizes are those of a run, which is prepared from `values`.

    Larger output weights make its captions differ, and with a larger bias of EOS most of them end after a few words.
    """
    search = {"beam_size": 3, "max_length": 8, "batch_size": 8, "decoding": {"min_length": 4}}
    folder = prepare(parse_config({**values, "seed": seed, "evaluation": search}))
    config = folder.config
    torch.manual_seed(seed)
    model = build_model(config.model, folder.sizes)
    backbone = Backbone(config.backbone) if config.has_backbone else None
    with torch.no_grad():
        model.lm_head.weight *= 4  # type: ignore[operator, union-attr]
        model.lm_head.bias[folder.vocabulary.eos] += 8  # type: ignore[operator, union-attr, index]
    protocol = run_protocol(config, None)
    save_bundle(bundle, Captioner(model, backbone), folder.vocabulary, name="teacher", protocol=protocol, info={})
    return bundle


def stored_captions(config: RunConfig) -> CaptionStore:
    """The store of a run's teacher."""
    teacher = find_teacher(config)
    assert teacher is not None
    return caption_store(config, teacher)


def store_captions(config: RunConfig, captions: Sequence[str | None]) -> Mapping[str, list[str | None]]:
    """Stores captions of a run's training images in place of its teacher's: of image n the nth, then the next one.

    Returns them by content key.
    """
    keys = images_to_caption(config, prepare(config).dataset).column("key")
    texts = {key: [captions[(number + rank) % len(captions)] for rank in range(3)] for number, key in enumerate(keys)}
    stored_captions(config).write(keys, texts)
    return texts


def region_values(storage: Path, bundle: Path) -> dict[str, Any]:
    """The configuration of a run on the synthetic regions with a teacher."""
    values = small_config(storage, model=SMALL_MODEL | MESHED_MEMORY) | {"distill": {"model": str(bundle)}}
    values["features"] = {"hdf5": "synthetic", "max_regions": 4}
    del values["backbone"]
    values["stages"] = [stage for stage in values["stages"] if not stage.get("train_backbone")]
    return values
