"""Captions whole splits on the cluster with one Ray task per worker. Each task captions one shard of the images.

Ray sends the tasks the list of images and the constraints. The tasks read models and features from the storage, so that
the nodes need no common disk if the storage is on S3. A task yields its captions batch by batch. Ray repeats it on
another node if its node is lost. The captions of a teacher do not pass through the driver: tasks write them to a store.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.caption_files import write_n_best
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.vocabulary import UNK
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import Bundle, ModelSource
from raycap.pipeline.evaluation.scores.split_result import Hypothesis
from raycap.pipeline.features.store.store import open_store
from raycap.pipeline.runs.distillation.caption_store import CaptionStore, ImageChunks
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.processor import device_for, prepare_processor
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import load_weights

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton
    from raycap.pipeline.features.model_inputs import Images

logger = logging.getLogger(__name__)

NOT_READ = "it could not be read by a task whose node was lost with the reason"


class SplitTask(NamedTuple):
    """The images of a split. constraints: by image id, the words that the caption must contain, for images with any."""

    images: Dataset
    constraints: Mapping[int, ConstraintAutomaton] = {}


class Captioned(NamedTuple):
    """Captions by image id, the best first for each image, and {image id: reason} for images that cannot be read.

    seconds: that the workers took together, without the loading of models.
    """

    hypotheses: dict[int, list[Hypothesis]]
    unreadable: dict[int, str]
    seconds: float = 0.0

    @property
    def best(self) -> dict[int, Hypothesis]:
        """The best caption of each image."""
        return {image: ranked[0] for image, ranked in self.hypotheses.items()}

    @property
    def several(self) -> dict[int, list[str]]:
        """All captions of each image; {} if the search gave one caption per image."""
        several = {image: [each.caption for each in ranked] for image, ranked in self.hypotheses.items()}
        return several if any(len(captions) > 1 for captions in several.values()) else {}

    def write_n_best(self, path: Path) -> None:
        """Writes all captions of each image with their values from the search."""
        write_n_best(path, {image: [each.to_json() for each in ranked] for image, ranked in self.hypotheses.items()})

    def of(self, images: Sequence[int]) -> Captioned:
        """The part of these images, without the seconds, which are those of all images."""
        hypotheses = {image: self.hypotheses[image] for image in images if image in self.hypotheses}
        unreadable = {image: self.unreadable[image] for image in images if image in self.unreadable}
        return Captioned(hypotheses, unreadable)


@dataclass(frozen=True)
class RunModel:
    """A run's model with the weights that it delivers. It has no backbone and captions stored features."""

    folder: RunFolder

    def load(self) -> Bundle:
        from raycap.models.captioner import Captioner
        from raycap.models.registry import build_model

        folder = self.folder.on_worker()
        model = build_model(folder.config.model, folder.sizes)
        load_weights(model, folder.delivered_weights("model"))
        return Bundle(Captioner(model), folder.vocabulary, transform=None, config={})


def caption_on_cluster(
    models: Sequence[ModelSource],
    splits: Mapping[str, SplitTask],
    config: RunConfig,
    *,
    store: StoragePath | None = None,
    with_alignment: bool = True,
    skip_unreadable: bool = True,
) -> dict[str, Captioned]:
    """Captions each split with a model or an ensemble, in the order of the split's images. Ray must have been started.

    store: the features for models without a backbone. with_alignment: also compute how well the words of each best
    caption match the image's patches. skip_unreadable: report images that cannot be read, instead of raising an error.
    Raises StalledError after `workers.max_stall_minutes` without a caption.
    """
    import ray

    workers, watch = config.workers, StallWatch("captioning", config.workers)
    task = ray.remote(_caption_shard).options(num_returns="streaming", **workers.task_options)
    begin = time.monotonic()
    found = {name: Captioned({}, {}) for name in splits}
    computing: Counter[str] = Counter()
    shared_splits = ray.put(splits)  # once for all workers
    arguments = (models, shared_splits, config.without_tracker(), store, with_alignment, skip_unreadable)
    with watch, progress("captions  ", sum(len(split.images) for split in splits.values())) as advance:
        tasks = [task.remote(rank, *arguments) for rank in range(workers.num_workers)]
        for name, hypotheses, unreadable, seconds in watch.results(tasks):
            computing[name] += seconds
            found[name].hypotheses.update(hypotheses)
            found[name].unreadable.update(unreadable)
            advance(len(hypotheses) + len(unreadable))
    captioned, num_captioned = {}, 0
    for name, split in splits.items():
        hypotheses, unreadable, _ = found[name]
        order = split.images.column("image_id")
        if num_missing := len(set(order) - hypotheses.keys() - unreadable.keys()):
            raise RuntimeError(f"{num_missing} of {len(order)} images of {name} have no caption; run the command again")
        ordered = {image: hypotheses[image] for image in order if image in hypotheses}
        captioned[name] = Captioned(ordered, unreadable, computing[name])
        num_captioned += len(hypotheses)
    seconds = time.monotonic() - begin
    logger.info(f"captions  {num_captioned} images in {seconds:.0f} s, {num_captioned / seconds:.1f} images/s")
    return captioned


def _caption_shard(
    rank: int,
    models: Sequence[ModelSource],
    splits: Mapping[str, SplitTask],
    config: RunConfig,
    store: StoragePath | None,
    with_alignment: bool,
    skip_unreadable: bool,
) -> Iterator[tuple[str, dict[int, list[Hypothesis]], dict[int, str], float]]:
    """Captions the part of the images that belongs to worker number `rank`, batch by batch.

    Yields (split, captions, unreadable, seconds that they took).
    """
    from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches

    captioner = _TaskCaptioner(models, config, store)
    search = CaptionSearch(config.evaluation, captioner.vocabulary, with_alignment, skip_unreadable)
    context = captioner.context
    context.world_rank, context.world_size = rank, config.workers.num_workers
    for name, (images, constraints) in splits.items():
        inputs = captioner.inputs(images)
        begin = time.monotonic()
        for hypotheses, unreadable in caption_batches(captioner.models, inputs, search, context, constraints):
            yield name, hypotheses, unreadable, time.monotonic() - begin
            begin = time.monotonic()


def caption_to_store(
    model: ModelSource, chunks: ImageChunks, captions: CaptionStore, config: RunConfig, features: StoragePath | None
) -> dict[int, str]:
    """Captions images with a model and writes all captions of its search to a store. Ray must have been started.

    One task captions all images of a chunk. So its captions depend neither on the number of workers nor on what an
    earlier attempt has left, and the driver holds none. features: for a model without a backbone. Returns {image id:
    reason} of images that cannot be read. Raises StalledError as `caption_on_cluster`.
    """
    import ray

    workers, watch, begin = config.workers, StallWatch("captioning", config.workers), time.monotonic()
    unreadable: dict[int, str] = {}
    task = ray.remote(_caption_chunks).options(num_returns="streaming", **workers.task_options)
    arguments = (model, ray.put(chunks), captions, config.without_tracker(), features)
    num_images = len(chunks.images)
    with watch, progress("teacher   ", num_images) as advance:
        tasks = [task.remote(rank, *arguments) for rank in range(workers.num_workers)]
        for count, reasons in watch.results(tasks):
            unreadable.update(reasons)
            advance(count)
    seconds = time.monotonic() - begin
    logger.info(f"teacher     {num_images} images in {seconds:.0f} s, {num_images / seconds:.1f} images/s")
    return unreadable


def _caption_chunks(
    rank: int,
    model: ModelSource,
    chunks: ImageChunks,
    captions: CaptionStore,
    config: RunConfig,
    features: StoragePath | None,
) -> Iterator[tuple[int, dict[int, str]]]:
    """Captions and writes every `num_workers`-th chunk. Yields (number of images, unreadable ones) batch by batch."""
    own_chunks = chunks.of_worker(rank, config.workers.num_workers)
    if not own_chunks:  # the model need not be loaded
        return
    from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches

    captioner = _TaskCaptioner([model], config, features)
    search = CaptionSearch(config.evaluation, captioner.vocabulary, skip_unreadable=True, with_signals=False)
    batch_size = config.evaluation.images_at_a_time(captioner.context.device.type)
    for rows in own_chunks:
        chunk = Dataset(chunks.images.table[rows])
        keys = dict(zip(chunk.column("image_id"), chunk.column("key"), strict=True))
        if stored := captions.stored(list(keys.values())):  # Ray repeats a lost task, which must yield as many items
            for first in range(0, len(chunk), batch_size):
                part = list(keys.items())[first : first + batch_size]
                yield len(part), {image: NOT_READ for image, key in part if key not in stored}
            continue
        texts: dict[str, list[str | None]] = {}
        inputs = captioner.inputs(chunk)
        for hypotheses, unreadable in caption_batches(captioner.models, inputs, search, captioner.context):
            texts |= {keys[image]: captioner.finished(ranked) for image, ranked in hypotheses.items()}
            yield len(hypotheses) + len(unreadable), unreadable
        captions.write(list(keys.values()), texts)


class _TaskCaptioner:
    """The models of a task in its process, with what their inputs are read from."""

    def __init__(self, models: Sequence[ModelSource], config: RunConfig, store: StoragePath | None) -> None:
        """store: the features for models without a backbone. Raises UserError for models of different vocabularies."""
        from raycap.pipeline.runtime.context import LocalContext

        workers = config.workers
        self.context = LocalContext(device_for(workers.gpus_per_worker))
        prepare_processor(workers.threads_per_worker)
        self.bundles = [model.load() for model in models]
        self.vocabulary = self.bundles[0].vocabulary
        if any(bundle.vocabulary != self.vocabulary for bundle in self.bundles):
            raise UserError(
                "the models of an ensemble must share one vocabulary, word by word, and one tokenizer; these do not"
            )
        for bundle in self.bundles:
            bundle.captioner.to(self.context.device)
        self.models = [bundle.captioner for bundle in self.bundles]
        self.features = None if store is None else open_store(store, config.features)
        self.reading: dict[str, Any] = {
            "max_pixels": config.data.max_pixels,
            "threads": workers.threads_per_worker,
            "options": config.storage.options,
        }

    def inputs(self, images: Dataset) -> list[Images]:
        """Each model's inputs of these images."""
        from raycap.pipeline.features.model_inputs import Images

        return [
            Images(images, None if bundle.transform else self.features, bundle.transform, **self.reading)
            for bundle in self.bundles
        ]

    def finished(self, ranked: Sequence[Hypothesis]) -> list[str | None]:
        """The captions of an image, with None for those that have no EOS or contain UNK."""
        eos, unknown = self.vocabulary.eos, self.vocabulary.ids[UNK]
        found = [each for each in ranked if math.isfinite(each.log_prob)]  # a beam may have found fewer than its size
        return [each.caption if eos in each.tokens and unknown not in each.tokens else None for each in found]
