"""Captions whole splits on the cluster with one Ray task per worker. Each task captions one shard of the images.

Ray sends the tasks the list of images and the constraints. The tasks read models and features from the storage, so that
the nodes need no common disk if the storage is on S3. A task yields its captions batch by batch. Ray repeats it on
another node if its node is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.captioning.bundle import Bundle
from pipeline.captioning.model_sources import ModelSource
from pipeline.cluster.stalls import StallWatch
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features.store import open_store
from pipeline.runs.folder import RunFolder
from pipeline.runtime.progress import progress
from pipeline.scoring.result_files import write_n_best
from pipeline.scoring.split_result import Hypothesis
from pipeline.storage.path import StoragePath
from pipeline.storage.weights import load_weights

if TYPE_CHECKING:
    from models.constraints import ConstraintAutomaton

logger = logging.getLogger(__name__)


class SplitTask(NamedTuple):
    """The images of a split. constraints: by image id, the words that the caption must contain, for images with any."""

    images: Dataset
    constraints: Mapping[int, ConstraintAutomaton] = {}


class Captioned(NamedTuple):
    """Captions by image id, the best first for each image, and {image id: reason} for images that cannot be read."""

    hypotheses: dict[int, list[Hypothesis]]
    unreadable: dict[int, str]

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
        """The part of these images."""
        hypotheses = {image: self.hypotheses[image] for image in images if image in self.hypotheses}
        return Captioned(hypotheses, {image: self.unreadable[image] for image in images if image in self.unreadable})


@dataclass(frozen=True)
class RunModel:
    """A run's model with its final weights. It has no backbone and captions stored features."""

    folder: RunFolder

    def load(self) -> Bundle:
        from models.captioner import Captioner
        from models.registry import build_model

        folder = self.folder.on_worker()
        model = build_model(folder.config.model, folder.sizes)
        load_weights(model, folder.weights_before(stage=None, part="model"))  # without a stage: the final weights
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
    shared_splits = ray.put(splits)  # once for all workers
    arguments = (models, shared_splits, config.without_tracker(), store, with_alignment, skip_unreadable)
    with watch, progress("captions  ", sum(len(split.images) for split in splits.values())) as advance:
        tasks = [task.remote(rank, *arguments) for rank in range(workers.num_workers)]
        for name, hypotheses, unreadable in watch.results(tasks):
            found[name].hypotheses.update(hypotheses)
            found[name].unreadable.update(unreadable)
            advance(len(hypotheses) + len(unreadable))
    captioned, num_captioned = {}, 0
    for name, split in splits.items():
        hypotheses, unreadable = found[name]
        order = split.images.column("image_id")
        if num_missing := len(set(order) - hypotheses.keys() - unreadable.keys()):
            raise RuntimeError(f"{num_missing} of {len(order)} images of {name} have no caption; run the command again")
        captioned[name] = Captioned({image: hypotheses[image] for image in order if image in hypotheses}, unreadable)
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
) -> Iterator[tuple[str, dict[int, list[Hypothesis]], dict[int, str]]]:
    """Captions the part of the images that belongs to worker number `rank`. Yields (split, captions, unreadable)."""
    from pipeline.captioning.captioning import CaptionSearch, caption_batches
    from pipeline.features.model_inputs import Images
    from pipeline.runtime.context import LocalContext, device_for
    from pipeline.runtime.cpu import prepare_processor

    workers = config.workers
    context = LocalContext(device_for(workers.gpus_per_worker))
    context.world_rank, context.world_size = rank, workers.num_workers
    prepare_processor(workers.threads_per_worker)
    bundles = [model.load() for model in models]
    vocabulary = bundles[0].vocabulary
    if any(bundle.vocabulary != vocabulary for bundle in bundles):
        raise UserError(
            "the models of an ensemble must share one vocabulary, word by word, and one tokenizer; these do not"
        )
    for bundle in bundles:
        bundle.captioner.to(context.device)
    feature_store = None if store is None else open_store(store, config.features)
    search = CaptionSearch(config.evaluation, vocabulary, with_alignment, skip_unreadable)
    reading: dict[str, Any] = {
        "max_pixels": config.data.max_pixels,
        "threads": workers.threads_per_worker,
        "options": config.storage.options,
    }
    captioners = [bundle.captioner for bundle in bundles]
    for name, (images, constraints) in splits.items():
        inputs = [
            Images(images, None if bundle.transform else feature_store, bundle.transform, **reading)
            for bundle in bundles
        ]
        for hypotheses, unreadable in caption_batches(captioners, inputs, search, context, constraints):
            yield name, hypotheses, unreadable
