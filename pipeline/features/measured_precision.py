"""The precision `auto` of an extraction: measured once, where actors compute, and kept in the storage."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from models.config import BackboneConfig
from pipeline.config.sections import ACTOR_CPUS, FeatureSection
from pipeline.features.interruptions import one_sentence
from pipeline.features.store import feature_key
from pipeline.storage.path import StoragePath
from pipeline.storage.s3 import ConflictError
from pipeline.untrusted.documents import parse_json

if TYPE_CHECKING:
    from pipeline.runtime.precision import PrecisionTimes

logger = logging.getLogger(__name__)

NUM_STAGES = 4  # of the Swins that timm names
PRECISIONS = ("float32", "bfloat16")
NOT_A_SIZE = ("weights", "drop_path", "gradient_checkpointing")  # keys of a backbone that change no feature's time
MAX_BYTES = 4096  # of a record


def decided_precision(
    backbone: BackboneConfig,
    settings: FeatureSection,
    folder: StoragePath,
    start_ray: Callable[[], AbstractContextManager[object]],
) -> str:
    """float32 or bfloat16: the one that `settings` names, or for `auto` the faster one.

    folder: where the storage keeps the decision for each backbone and kind of device, so that all of its features have
    one precision, on whatever machine they are computed later. The first extraction measures, in a Ray task with an
    actor's resources, which takes some seconds.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    kind = "GPU" if settings.gpus_per_actor else "CPU"
    sizes = {key: value for key, value in asdict(backbone).items() if key not in NOT_A_SIZE}
    record = folder / f"{feature_key({'backbone': sizes, 'device': kind})}.json"
    decision, tag = _recorded(record)
    if decision is None:
        times = _measure_on_ray(backbone, settings, start_ray)
        content = {"precision": times.fastest, **asdict(times), "nonce": secrets.token_hex(8)}
        try:
            record.write_if(json.dumps(content, indent=1).encode(), tag)
            decision = times.fastest
        except ConflictError:  # another extraction was faster
            decision = _recorded(record)[0] or times.fastest
        logger.info(
            f"features  in {decision} from now on: an image takes {1000 * times.float32:.0f} ms in float32 and "
            f"{1000 * times.bfloat16:.0f} ms in bfloat16 ({times.device}, one block of each stage)"
        )
    return decision


def _recorded(record: StoragePath) -> tuple[str | None, str | None]:
    """The storage's decision, and the tag of the record; None without one. A damaged record has no decision."""
    try:
        data, tag = record.read_tagged()
    except FileNotFoundError:
        return None, None
    with suppress(ValueError):
        content = parse_json(data[:MAX_BYTES], str(record))
        if isinstance(content, dict) and content.get("precision") in PRECISIONS:
            return str(content["precision"]), tag
    logger.warning(f"damaged   {record} is no record of a precision; it is made again")
    return None, tag


def _measure_on_ray(
    backbone: BackboneConfig, settings: FeatureSection, start_ray: Callable[[], AbstractContextManager[object]]
) -> PrecisionTimes:
    """Measures in a Ray task with the resources of an actor."""
    with start_ray(), one_sentence("the measurement of precisions"):
        import ray

        task = ray.remote(measure_extraction).options(num_cpus=ACTOR_CPUS, num_gpus=settings.gpus_per_actor)
        times: PrecisionTimes = ray.get(task.remote(backbone, settings))
        return times


def measure_extraction(backbone: BackboneConfig, settings: FeatureSection) -> PrecisionTimes:
    """Seconds per image of a backbone with one block in each stage, whose shapes are those of the whole backbone.

    A CPU computes one image at a time, and a GPU a batch.
    """
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import computing_thread

    device: Any = device_for(settings.gpus_per_actor)
    size = settings.batch_size if device.type == "cuda" else 1

    def measure() -> PrecisionTimes:
        import torch

        from models.backbone import Backbone
        from pipeline.runtime.precision import measure_precisions

        num_stages = NUM_STAGES if backbone.depths is None else len(backbone.depths)
        thin = replace(backbone, depths=(1,) * num_stages, weights="none", gradient_checkpointing=False)
        model = Backbone(thin, with_weights=False).eval().to(device)
        images = torch.rand(size, 3, backbone.image_size, backbone.image_size, device=device)
        return measure_precisions(lambda: model(images), device)

    with computing_thread(settings.threads_per_actor) as thread:
        times = thread.submit(measure).result()
    return replace(times, float32=times.float32 / size, bfloat16=times.bfloat16 / size)
