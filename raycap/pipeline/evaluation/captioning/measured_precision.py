"""The precision `auto` of a search for captions: measured where workers search, and kept in the storage."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raycap.models.config import ModelSizes
from raycap.pipeline.cluster.stalls import StallWatch, one_sentence
from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.features.precision import NOT_A_SIZE as NOT_A_BACKBONE_SIZE
from raycap.pipeline.features.precision import decided_precision
from raycap.pipeline.runtime.processor import device_for, measure_precisions, prepare_processor

if TYPE_CHECKING:
    from raycap.models.base import CaptionModel, Features
    from raycap.pipeline.runtime.processor import PrecisionTimes

CPU_IMAGES = 8  # of the measured search
STEPS = 6
VOCABULARY_SIZE = 10_000  # about COCO's
REGION_WIDTH = 2048  # of a detector's features
NOT_A_SIZE = ("dropout", "max_positions", "word_vectors", "train_word_vectors")  # keys that change no search's time


def with_precision(config: RunConfig, address: str | None) -> RunConfig:
    """The configuration with the precision that its searches have, where `evaluation.precision` is `auto`.

    The storage keeps the decision for each model and backbone section and kind of device. The first command measures on
    the Ray at `address`, in a task with a worker's resources, which takes some seconds. The measured search reads
    features, also where a bundle contains a backbone.
    """
    if config.evaluation.precision != "auto":
        return config
    backbone = config.backbone.feature_settings(*NOT_A_BACKBONE_SIZE)
    work = {
        "search": {key: value for key, value in asdict(config.model).items() if key not in NOT_A_SIZE},
        "features": backbone if config.has_backbone else {"max_regions": config.features.max_regions},
        "beam_size": config.evaluation.beam_size,
        "device": "GPU" if config.workers.gpus_per_worker else "CPU",
    }

    def measure() -> PrecisionTimes:
        import ray

        what = "the measurement of precisions"
        start_ray(config, address, "captions")
        with StallWatch(what, config.workers), one_sentence(what):
            task = ray.remote(measure_search).options(**config.workers.task_options)
            times: PrecisionTimes = ray.get(task.remote(config.without_tracker()))
            return times

    place, text = config.storage_place / "precision", f"captions of {STEPS} words, without the backbone"
    precision = decided_precision(work, place, measure, label="captions", measured=text)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"precision": precision})})


def measure_search(config: RunConfig) -> PrecisionTimes:
    """Seconds per image of a short beam search with the configured model, on random features.

    A CPU searches for CPU_IMAGES images at a time, and a GPU for as many as an evaluation, if its memory suffices.
    """
    import torch

    from raycap.models.captioner import build_model
    from raycap.models.decoding.search import beam_search

    workers, settings = config.workers, config.evaluation
    prepare_processor(workers.threads_per_worker)
    device: Any = device_for(workers.gpus_per_worker)
    images = settings.images_at_a_time(device.type) if device.type == "cuda" else CPU_IMAGES
    while True:
        features = _features(config, images, device)
        sizes = ModelSizes(features.tokens.shape[-1], VOCABULARY_SIZE, max_positions=STEPS, sos=1, eos=2, pad=0)
        model = build_model(config.model, sizes).eval().to(device)

        def search(model: CaptionModel = model, features: Features = features) -> None:
            beam_search(model, model.encode(features), beam_size=settings.beam_size, max_length=STEPS)

        try:
            return measure_precisions(search, device, images)
        except torch.OutOfMemoryError:
            if images == 1:
                raise
        images //= 2
        torch.cuda.empty_cache()


def _features(config: RunConfig, images: int, device: Any = "cpu") -> Features:
    """Random features with the sizes of the configured backbone's or detector's."""
    import torch

    from raycap.models.base import Features
    from raycap.models.encoders.backbone import Backbone

    if not config.has_backbone:
        count = config.features.max_regions
        tokens, boxes = (
            torch.randn(images, count, REGION_WIDTH, device=device),
            torch.rand(images, count, 4, device=device),
        )
        return Features(tokens, torch.full((images,), count, device=device), boxes)
    with torch.device("meta"):
        backbone = Backbone(config.backbone, with_weights=False)
    return Features(torch.randn(images, backbone.num_tokens, backbone.width, device=device))
