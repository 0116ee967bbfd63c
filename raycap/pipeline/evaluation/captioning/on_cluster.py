"""Captions whole splits on the cluster with one Ray task per worker. Each task captions one shard of the images.

Tasks get the list of images and the constraints from Ray, and read models and features from the storage. So nodes need
no common disk if the storage is on S3. If a node is lost, Ray repeats its task on another node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.cluster.stalls import StallWatch, one_sentence
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.processor import device_for, prepare_processor, slow_bfloat16
from raycap.pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton
    from raycap.pipeline.evaluation.captioning.bundle import Bundle

logger = logging.getLogger(__name__)


class SplitTask(NamedTuple):
    """The images of a split. constraints: {image id: automaton of the words that its caption must contain}."""

    images: Dataset
    constraints: Mapping[int, ConstraintAutomaton] = {}


class TaskModel(NamedTuple):
    """A model that tasks load. store: the features that it captions, or None if it captions pixels.

    If there is a store, the bundle's backbone is not used.
    """

    source: ModelSource
    store: StoragePath | None = None


def caption_on_cluster(
    models: Sequence[TaskModel], splits: Mapping[str, SplitTask], config: RunConfig, *, with_signals: bool = True
) -> tuple[dict[str, dict[int, ImageCaption]], float]:
    """Captions each split with a model or an ensemble, in the order of the split's images. Ray must have been started.

    with_signals: also compute the signals of each best caption. Returns the captions of each split by image id, and the
    workers' seconds in total, without the loading of models. An image that cannot be read has the reason in place of
    captions. Raises JobFailedError if no caption arrives for `workers.max_stall_minutes`.
    """
    import ray

    workers, watch = config.workers, StallWatch("captioning", config.workers)
    begin, worker_seconds = time.monotonic(), 0.0
    found: dict[str, dict[int, ImageCaption]] = {name: {} for name in splits}
    num_images = sum(len(split.images) for split in splits.values())
    shared_splits = ray.put(splits)  # stored once, so that Ray does not copy the splits for each worker's call
    arguments = (models, shared_splits, config.without_tracker(), with_signals)
    calls = [(rank, *arguments) for rank in range(workers.num_workers)]
    with watch, progress("captions  ", num_images) as advance:
        if config.evaluation.precision == "bfloat16" and not workers.gpus_per_worker:
            check = ray.remote(slow_bfloat16).options(**workers.task_options)
            with one_sentence("the measurement of bfloat16"):
                warning: str = ray.get(check.remote("evaluation.precision"))
            if warning:
                logger.warning(f"slow      {warning}")
        for name, captions, seconds in watch.stream(_caption_shard, calls, workers.task_options):
            worker_seconds += seconds
            found[name] |= captions
            advance(len(captions))
    elapsed = time.monotonic() - begin
    logger.info(f"captions  {num_images} images in {elapsed:.0f} s, {num_images / elapsed:.1f} images/s")
    in_order = {
        name: {image: found[name][image] for image in split.images.column("image_id")} for name, split in splits.items()
    }
    return in_order, worker_seconds


def _caption_shard(
    rank: int, models: Sequence[TaskModel], splits: Mapping[str, SplitTask], config: RunConfig, with_signals: bool
) -> Iterator[tuple[str, dict[int, ImageCaption], float]]:
    """Captions the images of worker number `rank`, batch by batch.

    Yields (split, captions by image id, seconds for this batch).
    """
    from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches
    from raycap.pipeline.features.model_inputs import Images
    from raycap.pipeline.runtime.context import LocalContext

    workers = config.workers
    context = LocalContext(device_for(workers.gpus_per_worker))
    context.world_rank, context.world_size = rank, workers.num_workers
    prepare_processor(workers.threads)
    bundles = list(map(_load, models))
    if any(bundle.vocabulary != bundles[0].vocabulary for bundle in bundles):
        raise UserError(
            "the models of an ensemble must share one vocabulary, word by word, and one tokenizer; these do not"
        )
    captioners, sources = [], []
    for model, bundle in zip(models, bundles, strict=True):
        source = bundle.transform if model.store is None else open_store(model.store, config.features)
        if source is None:
            raise UserError("a bundle without a backbone captions stored features, and none are given")
        sources.append(source)
        captioners.append(bundle.captioner.to(context.device))
    reading: Values = {
        "max_pixels": config.data.max_pixels,
        "threads": workers.threads,
        "options": config.storage.options,
    }
    search = CaptionSearch(config.evaluation, bundles[0].vocabulary, with_signals, skip_unreadable=True)
    for name, (images, constraints) in splits.items():
        inputs = [Images(images, source, **reading) for source in sources]
        begin = time.monotonic()
        for hypotheses, unreadable in caption_batches(captioners, inputs, search, context, constraints):
            captions = {image: ImageCaption(tuple(ranked)) for image, ranked in hypotheses.items()}
            captions |= {image: ImageCaption(error=reason) for image, reason in unreadable.items()}
            yield name, captions, time.monotonic() - begin
            begin = time.monotonic()  # the next batch is timed from the moment at which it is asked for


def _load(model: TaskModel) -> Bundle:
    """Loads the bundle of a model. If there is a store, the backbone is left out, so that it takes no memory."""
    bundle = model.source.load()
    if model.store is None:
        return bundle
    return replace(bundle, captioner=bundle.captioner.without_backbone())
