"""Chooses the precision if it is `auto`, for features and for captions: measures once on Ray, and stores the result."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raycap.models.config import BackboneConfig, ModelSizes, Values
from raycap.pipeline.cluster.stalls import StallWatch, one_sentence
from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import ACTOR_CPUS, FeatureSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.processor import computing_thread, device_for, measure_precisions, prepare_processor
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import ConflictError
from raycap.pipeline.storage.untrusted.documents import parse_json, require_mapping

if TYPE_CHECKING:
    from raycap.pipeline.runtime.processor import PrecisionTimes

logger = logging.getLogger(__name__)

# keys of a backbone that do not change how long its features take
NOT_A_SIZE = ("weights", "drop_path", "gradient_checkpointing", "transform")
# keys of a model that do not change how long a search for captions takes
NOT_A_SEARCH_SIZE = ("dropout", "max_positions", "word_vectors", "train_word_vectors")
# A search for captions is measured with about the size of COCO's vocabulary, and with the usual width of regions.
STEPS, VOCABULARY_SIZE, REGION_WIDTH = 6, 10_000, 2048
CPU_IMAGES, GPU_IMAGES = 8, 64


def decided_precision(
    work: Mapping[str, object], folder: StoragePath, measure: Callable[[], PrecisionTimes], *, label: str, measured: str
) -> str:
    """The stored precision for a kind of work, float32 or bfloat16. If there is none, it is measured first.

    work: JSON values that identify the kind of work. folder: of the stored decisions. label: the name of the work in
    the log. measured: what `measure` computes, in words. If two callers measure at the same time, both use the decision
    that is written first.
    """
    record, decision, tag = _recorded(work, folder)
    if decision is None:
        times = measure()
        decision = times.fastest
        try:
            record.write_if(json.dumps({"precision": decision, **asdict(times)}, indent=1).encode(), tag)
        except ConflictError:
            decision = _recorded(work, folder)[1] or decision
        logger.info(f"{label:<9} in {decision} from now on: {times}, measured with {measured}")
    return decision


def _recorded(work: Mapping[str, object], folder: StoragePath) -> tuple[StoragePath, str | None, str | None]:
    """The file of the decision for a kind of work, the decision, and the file's tag.

    The decision is None if the file is missing or damaged. The tag is None if the file is missing.
    """
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


def _measured_on_ray(
    measure: Callable[..., PrecisionTimes], options: Mapping[str, object], *arguments: object
) -> PrecisionTimes:
    """The result of `measure(*arguments)` in a Ray task with these options."""
    import ray

    with one_sentence("the measurement of precisions"):
        times: PrecisionTimes = ray.get(ray.remote(measure).options(**options).remote(*arguments))
        return times


def extraction_precision(
    backbone: BackboneConfig,
    settings: FeatureSection,
    folder: StoragePath,
    start: Callable[[], AbstractContextManager[object]],
) -> str:
    """The precision of an extraction, float32 or bfloat16. If it is configured as `auto`, the faster one is chosen.

    folder: the folder of stored decisions, one for each backbone and kind of device. With a stored decision, all
    features have one precision, whichever machine computes them. start: starts Ray. The first extraction measures for
    some seconds, in a Ray task with the resources of an actor.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype

    def measure() -> PrecisionTimes:
        options = {"num_cpus": ACTOR_CPUS, "num_gpus": settings.gpus_per_actor}
        with start():
            return _measured_on_ray(measure_extraction, options, backbone, settings)

    text = f"one block of each stage of {backbone.name}"
    return decided_precision(_work(backbone, settings), folder, measure, label="features", measured=text)


def known_precision(backbone: BackboneConfig, settings: FeatureSection, folder: StoragePath) -> str | None:
    """The precision that `extraction_precision` would return without measuring. None if it would have to measure."""
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    return _recorded(_work(backbone, settings), folder)[1]


def _work(backbone: BackboneConfig, settings: FeatureSection) -> Values:
    """The kind of work of an extraction: the backbone's sizes and the kind of device."""
    return {"backbone": backbone.feature_settings(*NOT_A_SIZE), "device": "GPU" if settings.gpus_per_actor else "CPU"}


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

    with computing_thread(settings.threads_per_actor) as thread:
        return thread.submit(measure).result()


def with_search_precision(config: RunConfig, address: str | None) -> RunConfig:
    """The configuration with the faster precision in place of `auto` as `evaluation.precision`.

    The decision is stored for each model, backbone and kind of device. The first command measures for some seconds on
    the Ray cluster at `address`, in a task with a worker's resources. The search is measured on features, even if a
    bundle contains a backbone.
    """
    if config.evaluation.precision != "auto":
        return config
    backbone, workers = config.backbone.feature_settings(*NOT_A_SIZE), config.workers
    work = {
        "search": {key: value for key, value in asdict(config.model).items() if key not in NOT_A_SEARCH_SIZE},
        "features": backbone if config.has_backbone else {"max_regions": config.features.max_regions},
        "beam_size": config.evaluation.beam_size,
        "device": "GPU" if workers.gpus_per_worker else "CPU",
    }

    def measure() -> PrecisionTimes:
        start_ray(config, address, "captions")
        with StallWatch("the measurement of precisions", workers):
            return _measured_on_ray(measure_search, workers.task_options, config.without_tracker())

    place, text = config.storage_place / "precision", f"captions of {STEPS} words, without the backbone"
    precision = decided_precision(work, place, measure, label="captions", measured=text)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"precision": precision})})


def measure_search(config: RunConfig) -> PrecisionTimes:
    """Seconds per image of a short beam search with the configured model, on random features of the same sizes."""
    import torch

    from raycap.models.base import Features
    from raycap.models.captioner import build_model
    from raycap.models.decoding.search import beam_search
    from raycap.models.encoders.backbone import Backbone

    prepare_processor(config.workers.threads_per_worker)
    device: Any = device_for(config.workers.gpus_per_worker)
    images = GPU_IMAGES if device.type == "cuda" else CPU_IMAGES
    if config.has_backbone:
        with torch.device("meta"):
            backbone = Backbone(config.backbone, with_weights=False)
        features = Features(torch.randn(images, backbone.num_tokens, backbone.width, device=device))
    else:
        count = config.features.max_regions
        lengths, boxes = torch.full((images,), count, device=device), torch.rand(images, count, 4, device=device)
        features = Features(torch.randn(images, count, REGION_WIDTH, device=device), lengths, boxes)
    sizes = ModelSizes(features.tokens.shape[-1], VOCABULARY_SIZE, max_positions=STEPS, sos=1, eos=2, pad=0)
    model = build_model(config.model, sizes).eval().to(device)
    beams = config.evaluation.beam_size
    return measure_precisions(
        lambda: beam_search(model, model.encode(features), beam_size=beams, max_length=STEPS), device, images
    )
