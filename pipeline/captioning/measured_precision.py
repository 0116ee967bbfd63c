"""The precision `auto` of a search for captions: measured where workers search, and kept in the storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from models.config import ModelSizes
from pipeline.config.run import RunConfig
from pipeline.features.decided_precision import decided_precision
from pipeline.features.interruptions import one_sentence

if TYPE_CHECKING:
    from pipeline.runtime.precision import PrecisionTimes

CPU_IMAGES = 8  # of the measured search
STEPS = 6
VOCABULARY_SIZE, FEATURE_WIDTH = 10_000, 1536  # about those of COCO with Swin-L
TOKEN_SIDE = 32  # pixels of an image token's side
NOT_A_SIZE = ("dropout", "max_positions", "word_vectors", "train_word_vectors")  # keys that change no search's time


def with_search_precision(config: RunConfig, start_ray: Callable[[], object]) -> RunConfig:
    """The configuration with the precision that its searches have, where `evaluation.precision` is `auto`.

    start_ray: joins or starts Ray, and waits until a worker can be placed. The storage keeps the decision for each
    model section and kind of device. The first command measures, in a Ray task with a worker's resources, which takes
    some seconds.
    """
    if config.evaluation.precision != "auto":
        return config
    work = {
        "search": {key: value for key, value in asdict(config.model).items() if key not in NOT_A_SIZE},
        "image_tokens": _image_tokens(config),
        "beam_size": config.evaluation.beam_size,
        "device": "GPU" if config.workers.gpus_per_worker else "CPU",
    }

    def measure() -> PrecisionTimes:
        import ray

        start_ray()
        with one_sentence("the measurement of precisions"):
            task = ray.remote(measure_search).options(**config.workers.task_options)
            times: PrecisionTimes = ray.get(task.remote(config.without_tracker()))
            return times

    precision = decided_precision(work, config.storage_place / "precision", measure, label="captions")
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"precision": precision})})


def measure_search(config: RunConfig) -> PrecisionTimes:
    """Seconds per image of a short beam search with the configured model, on random features of about COCO's sizes."""
    import torch

    from models.base import Features
    from models.decoding import beam_search
    from models.registry import build_model
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor
    from pipeline.runtime.precision import measure_precisions

    workers, settings = config.workers, config.evaluation
    prepare_processor(workers.threads_per_worker)
    device: Any = device_for(workers.gpus_per_worker)
    images = settings.images_at_a_time(device.type) if device.type == "cuda" else CPU_IMAGES
    tokens = _image_tokens(config)
    sizes = ModelSizes(FEATURE_WIDTH, VOCABULARY_SIZE, max_positions=STEPS, sos=1, eos=2, pad=0)
    model = build_model(config.model, sizes).eval().to(device)
    features = Features(
        torch.randn(images, tokens, FEATURE_WIDTH, device=device),
        torch.full((images,), tokens, device=device),
        torch.rand(images, tokens, 4, device=device),
    )
    return measure_precisions(
        lambda: beam_search(model, model.encode(features), beam_size=settings.beam_size, max_length=STEPS),
        device,
        images,
    )


def _image_tokens(config: RunConfig) -> int:
    """About the number of tokens of an image."""
    if not config.has_backbone:
        return config.features.max_regions
    return max(config.backbone.image_size // TOKEN_SIDE, 1) ** 2
