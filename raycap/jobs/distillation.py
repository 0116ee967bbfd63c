"""Captions the training images of a run or search with its teacher, as far as the storage lacks these captions."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.cluster.start import start_ray
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.vocabulary import UNK, Vocabulary
from raycap.pipeline.evaluation.captioning.bundle import bundle_source
from raycap.pipeline.evaluation.captioning.on_cluster import TaskCaptioner, TaskModel
from raycap.pipeline.evaluation.captions import RankedCaption
from raycap.pipeline.features.extraction import features_for_bundles
from raycap.pipeline.runs.distillation.caption_store import CaptionStore, ImageChunks, caption_store, images_to_caption
from raycap.pipeline.runs.distillation.teacher import find_teacher
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.names import shown

logger = logging.getLogger(__name__)

NOT_READ = "it could not be read by a task whose node was lost with the reason"


def caption_training_images(config: RunConfig, dataset: Dataset, address: str | None) -> None:
    """Adds the captions of the training images that the store of the teacher lacks. Starts Ray if there are any.

    Does nothing without the section `distill`. The log has the images that the teacher cannot read. An image with the
    content of another one is captioned once.
    """
    teacher = find_teacher(config)
    if teacher is None:
        return
    images, captions = images_to_caption(config, dataset), caption_store(config, teacher)
    is_missing = captions.lacks(images.table["key"])
    count = int(is_missing.sum())
    logger.info(
        f"teacher   {teacher.name} in {captions.folder.name}: {len(images) - count} of {len(images)} images there, "
        f"{count} to caption"
    )
    if not count:
        return
    missing = Dataset(images.table.filter(pa.array(is_missing)))
    start_ray(config, address, "captions")
    teaching = teacher.config_of(config)
    readable, features = features_for_bundles(teaching, missing)
    is_wanted = pc.is_in(images.table["image_id"], value_set=readable.table["image_id"])
    chunks = captions.divide(images, ~is_missing, is_wanted.to_numpy(zero_copy_only=False))
    model = TaskModel(bundle_source(teacher.location, config), features)
    unreadable = caption_to_store(model, chunks, captions, teaching)
    if unreadable:
        image, reason = next(iter(unreadable.items()))
        logger.warning(
            f"{len(unreadable)} images have no captions of the teacher; the first is {image}: {shown(reason)}"
        )


def caption_to_store(
    model: TaskModel, chunks: ImageChunks, captions: CaptionStore, config: RunConfig
) -> dict[int, str]:
    """Captions images with a model and writes all captions of its search to a store. Ray must have been started.

    One task captions all images of a chunk. So its captions depend neither on the number of workers nor on what an
    earlier attempt has left, and the driver holds none. Returns {image id: reason} of images that cannot be read.
    Raises StalledError as `caption_on_cluster`.
    """
    import ray

    workers, watch, begin = config.workers, StallWatch("captioning", config.workers), time.monotonic()
    unreadable: dict[int, str] = {}
    arguments = (model, ray.put(chunks), captions, config.without_tracker())
    num_images = len(chunks.images)
    with watch, progress("teacher   ", num_images) as advance:
        calls = [(rank, *arguments) for rank in range(workers.num_workers)]
        for count, reasons in watch.stream(_caption_chunks, calls, workers.task_options):
            unreadable.update(reasons)
            advance(count)
    seconds = time.monotonic() - begin
    logger.info(f"teacher     {num_images} images in {seconds:.0f} s, {num_images / seconds:.1f} images/s")
    return unreadable


def _caption_chunks(
    rank: int, model: TaskModel, chunks: ImageChunks, captions: CaptionStore, config: RunConfig
) -> Iterator[tuple[int, dict[int, str]]]:
    """Captions and writes every `num_workers`-th chunk. Yields (number of images, unreadable ones) batch by batch."""
    own_chunks = chunks.of_worker(rank, config.workers.num_workers)
    if not own_chunks:  # the model need not be loaded
        return
    from raycap.pipeline.evaluation.captioning.search import CaptionSearch, caption_batches

    captioner = TaskCaptioner([model], config)
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
            texts |= {keys[image]: _finished(ranked, captioner.vocabulary) for image, ranked in hypotheses.items()}
            yield len(hypotheses) + len(unreadable), unreadable
        captions.write(list(keys.values()), texts)


def _finished(ranked: Sequence[RankedCaption], vocabulary: Vocabulary) -> list[str | None]:
    """The captions of an image, with None for those that have no EOS or contain UNK."""
    eos, unknown = vocabulary.eos, vocabulary.ids[UNK]
    found = [each for each in ranked if math.isfinite(each.log_prob)]  # a beam may have found fewer than its size
    return [each.caption if eos in each.ids and unknown not in each.ids else None for each in found]
