"""Chooses the precision of features if it is `auto`: measures once on Ray, and stores the result."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raycap.models.config import BackboneConfig, Values
from raycap.pipeline.cluster.stalls import one_sentence
from raycap.pipeline.config.sections import ACTOR_CPUS, FeatureSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.processor import computing_thread, device_for, measure_precisions
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import ConflictError
from raycap.pipeline.storage.untrusted.documents import parse_json, require_mapping

if TYPE_CHECKING:
    from raycap.pipeline.runtime.processor import PrecisionTimes

logger = logging.getLogger(__name__)

# keys of a backbone that do not change how long its features take
NOT_A_SIZE = ("weights", "drop_path", "gradient_checkpointing", "transform")


def _recorded(
    backbone: BackboneConfig, settings: FeatureSection, folder: StoragePath
) -> tuple[StoragePath, str | None, str | None]:
    """The file of the decision for a backbone and the kind of device, the decision, and the file's tag.

    The decision is None if the file is missing or damaged. The tag is None if the file is missing.
    """
    work: Values = {
        "backbone": backbone.feature_settings(*NOT_A_SIZE),
        "device": "GPU" if settings.gpus_per_actor else "CPU",
    }
    record = folder / f"{hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:20]}.json"
    try:
        content, tag = record.read_tagged()
    except FileNotFoundError:
        return record, None, None
    with suppress(UserError):
        decision = require_mapping(parse_json(content, str(record)), str(record)).get("precision")
        if decision in ("float32", "bfloat16"):
            return record, str(decision), tag
    logger.warning(f"damaged   {record} names no precision; the next measurement replaces it")
    return record, None, tag


def extraction_precision(
    backbone: BackboneConfig,
    settings: FeatureSection,
    folder: StoragePath,
    start: Callable[[], AbstractContextManager[object]],
) -> str:
    """The `decided_precision` of an extraction. The first extraction measures for some seconds, in a Ray task.

    The task has the resources of an actor. start: starts Ray.
    """

    def measure() -> PrecisionTimes:
        options = {"num_cpus": ACTOR_CPUS, "num_gpus": settings.gpus_per_actor}
        with start(), one_sentence("the measurement of precisions"):
            import ray

            task = ray.remote(measure_extraction).options(**options)
            times: PrecisionTimes = ray.get(task.remote(backbone, settings))
        return times

    return decided_precision(backbone, settings, folder, measure)


def decided_precision(
    backbone: BackboneConfig, settings: FeatureSection, folder: StoragePath, measure: Callable[[], PrecisionTimes]
) -> str:
    """The precision of an extraction, float32 or bfloat16. If it is configured as `auto`, the faster one is chosen.

    folder: the folder of stored decisions, one for each backbone and kind of device. With a stored decision, all
    features have one precision, whichever machine computes them. If two callers measure at the same time, both use the
    decision that is written first.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    record, decision, tag = _recorded(backbone, settings, folder)
    if decision is None:
        times = measure()
        decision = times.fastest
        try:
            record.write_if(json.dumps({"precision": decision, **asdict(times)}, indent=1).encode(), tag)
        except ConflictError:
            decision = _recorded(backbone, settings, folder)[1] or decision
        measured = f"one block of each stage of {backbone.name}"
        logger.info(f"features  in {decision} from now on: {times}, measured with {measured}")
    return decision


def known_precision(backbone: BackboneConfig, settings: FeatureSection, folder: StoragePath) -> str | None:
    """The precision that `extraction_precision` would return without measuring. None if it would have to measure."""
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    return _recorded(backbone, settings, folder)[1]


def measure_extraction(backbone: BackboneConfig, settings: FeatureSection) -> PrecisionTimes:
    """Seconds per image of a backbone in each precision. A CPU computes one image at a time, and a GPU a batch.

    Only one block of each stage is measured, because that takes less time and shows the faster precision as well. A
    backbone with fixed depths is measured as a whole.
    """
    device: Any = device_for(settings.gpus_per_actor)
    size = settings.batch_size if device.type == "cuda" else 1

    def measure() -> PrecisionTimes:
        import torch

        from raycap.models.encoders.backbone import Backbone, with_one_block_per_stage

        model = Backbone(with_one_block_per_stage(backbone), with_weights=False).eval().to(device)
        images = torch.rand(size, 3, backbone.image_size, backbone.image_size, device=device)
        return measure_precisions(lambda: model(images), device, size)

    with computing_thread(settings.threads) as thread:
        return thread.submit(measure).result()
