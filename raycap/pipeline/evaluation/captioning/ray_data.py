"""Captions very many images through Ray Data. CPU tasks read and decode them, and a pool of actors captions them.

The driver and Ray's object store keep the names of all images. The cluster keeps a few blocks of at most `BLOCK_SIZE`
images.
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
    """The captioning processes. Their number follows the load and the cluster, which may grow meanwhile.

    gpus: of each process. max_size: the largest number of processes; None for as many as the cluster has room for.
    """

    gpus: float = 0
    max_size: int | None = None

    @property
    def cpus(self) -> float:
        """The CPUs of each process. A process on a CPU leaves room for the decoding on a node with one CPU."""
        return ACTOR_CPUS if self.gpus else 1 - DECODING_CPUS

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources without which no image can be captioned: those of one process and of one decoding task."""
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

    search: the settings of a `CaptionService`, with a precision other than `auto`. Ray must have been started, and
    every node must be able to read local names. Raises StorageError while the storage is out of order or refuses
    requests, and JobFailedError if Ray loses processes too often. A stall does not end it; the caller must watch for
    one.
    """
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    repeat_interrupted_tasks()
    DataContext.get_current().execution_no_progress_timeout_s = -1  # the caller's watch ends a stall
    DataContext.get_current().execution_options.preserve_order = True
    # Arrow's text cannot hold names that are not UTF-8, but its bytes can.
    encoded = np.array([name.encode(errors="surrogatepass") for name in names], object)
    parts = np.array_split(encoded, math.ceil(len(names) / BLOCK_SIZE))
    blocks = [pa.table({"name": pa.array(part, pa.binary())}) for part in parts]
    decoded = ray.data.from_blocks(blocks).map_batches(  # `from_arrow` would run a task for each block
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
            yield _text(row["name"]), json.loads(row["found"])


def _text(name: bytes) -> str:
    """The name of an image, which blocks hold as bytes."""
    return name.decode(errors="surrogatepass")


def _decode(batch: dict[str, np.ndarray], transform: ImageTransform) -> Values:
    """Resized pixels (B, H, W, 3) uint8 of the named images; an unreadable image is black and has a reason."""
    names, side = [_text(name) for name in batch["name"]], transform.image_size
    pixels = np.zeros((len(names), side, side, 3), np.uint8)

    def decode(index: int) -> str:
        """Writes the pixels of one image of the batch, and returns its reason."""
        try:
            pixels[index] = transform.resize(load_image(names[index]))
        except BadImage as error:
            return str(error)
        return ""

    # Several threads help only with files on S3, because requests mostly wait.
    with ThreadPoolExecutor(8 if any(map(is_remote, names)) else 1) as pool:
        reasons = list(pool.map(decode, range(len(pixels))))
    return {"name": batch["name"], "pixels": pixels, "reason": np.array(reasons)}


class _CaptionActor:
    """Loads the model once and captions batches of decoded images."""

    def __init__(self, model: ModelSource, search: Values, num_results: int, gpus: float) -> None:
        prepare_processor()
        device = device_for(gpus).type  # Ray leaves GPUs visible to processes that have asked for none
        self.service = CaptionService(model.load(), device=device, **search)
        self.search = self.service.changed_search({}, num_results)

    def __call__(self, batch: dict[str, np.ndarray]) -> Values:
        """Captions a batch of `_decode`. The column found holds JSON (`ImageCaption.to_json`)."""
        found = [ImageCaption(error=str(reason)) for reason in batch["reason"]]
        readable = [index for index, reason in enumerate(batch["reason"]) if not reason]
        if readable:
            pixels = torch.from_numpy(batch["pixels"][readable]).to(self.service.device)
            pixels = self.service.transform.normalize(pixels).contiguous()
            for index, captions in zip(readable, self.service.caption(pixels, self.search), strict=True):
                found[index] = captions
        return {"name": batch["name"], "found": np.array([json.dumps(each.to_json()) for each in found])}
