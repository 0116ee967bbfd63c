"""Captions the training images of a run or search with its teacher, as far as the storage lacks these captions."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.compute as pc

from raycap.jobs.cluster import start_ray
from raycap.jobs.cluster_captions import caption_to_store
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.captioning.bundle import bundle_source
from raycap.pipeline.features.extraction import features_for_bundles
from raycap.pipeline.runs.distillation.caption_store import caption_store, images_to_caption
from raycap.pipeline.runs.distillation.teacher import find_teacher
from raycap.pipeline.runtime.names import shown

logger = logging.getLogger(__name__)


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
    source = bundle_source(teacher.location, config)
    unreadable = caption_to_store(source, chunks, captions, teaching, features)
    if unreadable:
        image, reason = next(iter(unreadable.items()))
        logger.warning(
            f"{len(unreadable)} images have no captions of the teacher; the first is {image}: {shown(reason)}"
        )
