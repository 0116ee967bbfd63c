"""Captions very many images through Ray Data. CPU tasks read and decode images, and a pool of actors captions them.

The driver and Ray's object store keep the names of all images, but the cluster keeps the pixels of a few blocks of at
most `BLOCK_SIZE` images only.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.cluster.stalls import one_sentence, repeat_interrupted_tasks
from raycap.pipeline.config.sections import ACTOR_CPUS, DECODING_CPUS
from raycap.pipeline.data.image_sources import load_image
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.runtime.processor import device_for, prepare_processor
from raycap.pipeline.storage.s3 import is_remote

BLOCK_SIZE = 64  # images


@dataclass(frozen=True)
class CaptionPool:
    """The captioning processes. Ray adapts their number to the load and to the size of the cluster.

    gpus: GPUs per process. max_size: the largest number of processes, or None for as many as the cluster has room for.
    """

    gpus: float = 0
    max_size: int | None = None

    @property
    def cpus(self) -> float:
        """CPUs per process. A process takes less than 1 CPU, so that a node with one CPU has room for decoding."""
        return ACTOR_CPUS if self.gpus else 1 - DECODING_CPUS

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The smallest resources for captioning: CPUs and GPUs of one captioning process and of one decoding task."""
        return [{"CPU": self.cpus, "GPU": self.gpus}, {"CPU": DECODING_CPUS}]


def caption_stream(
    names: Sequence[str],
    model: ModelSource,
    transform: ImageTransform,
    search: Values,
    num_results: int,
    pool: CaptionPool = CaptionPool(),
) -> Iterator[tuple[str, Values]]:
    """Yields (name, `ImageCaption.to_json`) of each image, in order.

    names: paths or URIs of images. Every node must be able to read the local paths. search: the settings of a
    `CaptionService`, with a precision other than `auto`. num_results: captions per image. Ray must have been started.
    Raises StorageError if the storage fails or refuses requests, and JobFailedError if Ray loses processes too often.
    There is no deadline, so the caller must watch for stalls.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    repeat_interrupted_tasks()
    DataContext.get_current().execution_no_progress_timeout_s = -1  # the caller's watch ends a stall
    DataContext.get_current().execution_options.preserve_order = True
    # Names are bytes, because Arrow's text type refuses names that are not UTF-8.
    encoded = np.array([name.encode(errors="surrogatepass") for name in names], object)
    parts = np.array_split(encoded, math.ceil(len(names) / BLOCK_SIZE))
    blocks = [pa.table({"name": pa.array(part, pa.binary())}) for part in parts]
    decoded = ray.data.from_blocks(blocks).map_batches(  # not `from_arrow`, which runs a task per block
        _decode,
        fn_kwargs={"transform": transform},
        batch_size=None,
        num_cpus=DECODING_CPUS,
    )
    captioned = decoded.map_batches(
        _CaptionActor,
        fn_constructor_kwargs={"model": model, "search": search, "num_results": num_results, "gpus": pool.gpus},
        batch_size=BLOCK_SIZE if pool.gpus else BLOCK_SIZE // 2,
        compute=ActorPoolStrategy(min_size=1, max_size=pool.max_size),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
    with one_sentence("captioning"):
        for row in captioned.iter_rows():
            yield row["name"].decode(errors="surrogatepass"), json.loads(row["found"])


def _decode(batch: dict[str, np.ndarray], transform: ImageTransform) -> Values:
    """Adds resized pixels (B, H, W, 3) uint8 to a batch of names. An unreadable image is black and has a reason."""
    names, side = [name.decode(errors="surrogatepass") for name in batch["name"]], transform.image_size
    pixels = np.zeros((len(names), side, side, 3), np.uint8)

    def decode(index: int) -> str:
        """Writes the pixels of one image to `pixels`. Returns why it cannot be read, or ""."""
        try:
            pixels[index] = transform.resize(load_image(names[index]))
        except BadImage as error:
            return str(error)
        return ""

    # Threads help with files on S3, because requests mostly wait. Local files need the CPU, so they get one thread.
    num_threads = 8 if any(map(is_remote, names)) else 1
    with ThreadPoolExecutor(num_threads) as pool:
        reasons = list(pool.map(decode, range(len(pixels))))
    return {"name": batch["name"], "pixels": pixels, "reason": np.array(reasons)}


class _CaptionActor:
    """Loads the model once and captions batches of decoded images."""

    def __init__(self, model: ModelSource, search: Values, num_results: int, gpus: float) -> None:
        prepare_processor()
        device = device_for(gpus).type  # not torch's default: Ray leaves GPUs visible to processes that asked for none
        self.service = CaptionService(model.load(), device=device, **search)
        self.search = self.service.changed_search({}, num_results)

    def __call__(self, batch: dict[str, np.ndarray]) -> Values:
        """Captions a batch of `_decode`. The result's column `found` contains JSON (`ImageCaption.to_json`)."""
        found = [ImageCaption(error=str(reason)) for reason in batch["reason"]]
        readable = [index for index, reason in enumerate(batch["reason"]) if not reason]
        if readable:
            pixels = torch.from_numpy(batch["pixels"][readable]).to(self.service.device)
            normalized = self.service.transform.normalize(pixels)
            for index, captions in zip(readable, self.service.caption(normalized, self.search), strict=True):
                found[index] = captions
        return {"name": batch["name"], "found": np.array([json.dumps(each.to_json()) for each in found])}
