"""The model of a captioning process: loads the model, forms and captions batches of images, loads new champions."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.results import Explanation, ImageCaption
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.address import NO_BACKBONE, ModelAddress
from raycap.pipeline.storage.path import storage_path

FAILED = "the server failed; its log has the reason"
SHORT_OF_MEMORY = "the device has too little memory for this batch; try again, with fewer images or smaller beams"
logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """The server refuses a request. status: the status of the HTTP answer. message: one sentence for the client.

    retry_after_s: seconds after which the client may try again, or None if the same request would be refused again.
    """

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(status, message, retry_after_s)  # all three, because unpickling passes them to __init__ again
        self.status, self.message, self.retry_after_s = status, message, retry_after_s

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class ModelInfo:
    """The description of a model for clients.

    bundle: the bundle's name. digest: the first 16 digits of the SHA-256 of its weights, as in `raycap caption --out`.
    system: for example expansionnet_v2. image_size: the side in pixels of the square that the model sees. keep_aspect:
    if true, images keep their aspect ratio and the ends of the longer side are cut off. crop_share: the fraction of the
    resized image's side that remains after the crop. device: cpu or cuda. precision: float32 or bfloat16. beam_size,
    max_length: of the model's default search. has_confidence: true if captions of this search have a confidence.
    """

    bundle: str
    digest: str
    system: str
    image_size: int
    keep_aspect: bool
    crop_share: float
    device: str
    precision: str
    beam_size: int
    max_length: int
    has_confidence: bool


@dataclass(frozen=True)
class Search:
    """The search of a request. If a value is None, the model's default is used. Equal searches share a batch."""

    beam_size: int | None = None
    num_results: int = 1
    max_length: int | None = None


@dataclass(frozen=True)
class ImageJob:
    """One image of a request. pixels: (H, W, 3) uint8, resized by `transform`."""

    pixels: np.ndarray
    transform: ImageTransform
    search: Search = Search()


@dataclass(frozen=True)
class Made:
    """A result and its model. batch_size: images in the forward pass. batch_index: the image's index among them."""

    result: ImageCaption | Explanation
    info: ModelInfo
    batch_size: int = 1
    batch_index: int = 0


Answer = Made | RefusedError | None  # None: the image was resized for another model and must be sent again


@dataclass(frozen=True)
class LoadedModel:
    """A model that captions images, and its description."""

    service: CaptionService
    info: ModelInfo

    def normalized(self, pixels: Sequence[np.ndarray]) -> torch.Tensor:
        """Normalizes images (H, W, 3) uint8 to one tensor (B, 3, H, W) on the model's device."""
        stacked = torch.from_numpy(np.stack(pixels)).to(self.service.device)
        return self.service.transform.normalize(stacked)

    def caption(self, pixels: Sequence[np.ndarray], search: Search) -> list[ImageCaption]:
        """Captions images (H, W, 3) uint8. Raises UserError if the model does not support the search."""
        changes = {"beam_size": search.beam_size, "max_length": search.max_length}
        settings = self.service.changed_search(changes, search.num_results)
        return self.service.caption(self.normalized(pixels), settings)


def load_address(model: str, storage: str, **settings: object) -> LoadedModel:
    """Loads the model at an address. storage: the storage with the champions. settings: those of `CaptionService`.

    Raises UserError if the model does not caption images, or if this machine does not have the device.
    """
    device = settings.get("device")
    if device not in (None, "cpu", "cuda"):
        raise UserError(f"device is {device!r}; expected cpu, cuda, or None for a GPU if there is one")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; give cpu, or check the driver with nvidia-smi")
    address = ModelAddress(model, storage_path(storage))
    return load_source(address.resolve(), settings, address)


def load_source(source: ModelSource, settings: Mapping[str, Any], address: ModelAddress) -> LoadedModel:
    """Loads a bundle. address: for errors. Raises UserError if the bundle does not caption images."""
    bundle = source.load()
    if bundle.transform is None:
        raise UserError(f"{address.text}: {NO_BACKBONE}")
    service, transform = CaptionService(bundle, **settings), bundle.transform
    info = ModelInfo(
        bundle=bundle.config["name"],
        digest=bundle.digest[:16],
        system=bundle.captioner.model.config.name,
        image_size=transform.image_size,
        keep_aspect=transform.keep_aspect,
        crop_share=transform.image_size / transform.scaled_side,
        device=service.device.type,
        precision=service.precision,
        beam_size=service.search.beam_size,
        max_length=service.search.max_length,
        has_confidence=bundle.confidence(service.search) is not None,
    )
    return LoadedModel(service, info)


class ModelHost:
    """Captions batches with the model `current`, which a new champion replaces between two batches.

    source: the bundle of `current`. settings: those of `CaptionService`. failure: the reason if the last look for a
    champion failed, else "". After a failure, the current model may be older than the champion.
    """

    def __init__(self, address: ModelAddress, source: ModelSource, settings: Mapping[str, Any]) -> None:
        self.address, self.source, self.settings, self.failure = address, source, settings, ""
        self.current = warm(load_source(source, settings, address))

    def look(self) -> bool:
        """Loads the champion if it differs from the current model. Returns True if it has replaced the model.

        If the champion cannot be read or loaded, the current model stays, and the next look tries again. Each reason is
        logged once.
        """
        try:
            found = self.address.resolve()
            is_new = found != self.source
            if is_new:  # a batch in progress keeps the old model
                self.current = warm(load_source(found, self.settings, self.address))
        except Exception as error:  # whatever fails, the current model can still serve
            text = without_secrets(one_line(error))
            if text != self.failure:
                logger.warning(f"{self.address.text}: the current champion stays, because the new one failed: {text}")
            self.failure = text
            return False
        self.source, self.failure = found, ""
        if is_new:
            logger.info(f"{self.address.text} is now {found.location} ({self.current.info.digest})")
        return is_new

    def follow(self, interval_s: float) -> None:
        """Calls `look` every `interval_s` seconds until the process ends."""
        while True:
            time.sleep(interval_s)
            self.look()

    def caption(self, jobs: Sequence[ImageJob]) -> list[Answer]:
        """Captions images with the current model. Images with equal searches share a forward pass."""
        current = self.current
        answers: list[Answer] = [None] * len(jobs)
        groups: dict[Search, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.transform == current.service.transform:
                groups.setdefault(job.search, []).append(index)
        for search, indices in groups.items():
            pixels = [jobs[index].pixels for index in indices]
            for index, answer in zip(indices, _captioned(current, pixels, search), strict=True):
                answers[index] = answer
        return answers

    def explain(self, jobs: Sequence[ImageJob], caption: str | None, head: int | None) -> list[Answer]:
        """The attention to one image for each word of a caption. If `caption` is None, the model makes one."""
        (job,), current = jobs, self.current
        if job.transform != current.service.transform:
            return [None]
        pixels = current.normalized([job.pixels])
        if caption is None:
            caption = current.service.caption(pixels)[0].caption or ""
        try:
            return [Made(current.service.explain(pixels[0], caption, head, with_attribution=False), current.info)]
        except UserError as error:
            return [RefusedError(422, one_line(error))]


def _captioned(model: LoadedModel, pixels: Sequence[np.ndarray], search: Search) -> Sequence[Answer]:
    """Captions images in one forward pass. If the pass fails, the answer to each image is a RefusedError."""
    try:
        found = model.caption(pixels, search)
        return [Made(result, model.info, len(found), place) for place, result in enumerate(found)]
    except UserError as error:
        refusal = RefusedError(422, one_line(error))
    except torch.OutOfMemoryError as error:
        logger.warning(f"{len(pixels)} images were not captioned: {without_secrets(one_line(error))}")
        traceback.clear_frames(error.__traceback__)  # the error's frames keep tensors in memory
        torch.cuda.empty_cache()
        refusal = RefusedError(503, SHORT_OF_MEMORY, 1)
    except Exception as error:
        logger.exception(f"{len(pixels)} images were not captioned: {without_secrets(one_line(error))}")
        refusal = RefusedError(500, FAILED)
    return [refusal] * len(pixels)


def warm(loaded: LoadedModel) -> LoadedModel:
    """Returns the model after it has captioned a black image, because a model's first caption is slow."""
    side = loaded.info.image_size
    loaded.caption([np.zeros((side, side, 3), np.uint8)], Search())
    return loaded


class Batcher:
    """Computes one batch at a time. A batch contains the waiting jobs in order of arrival, but at most `max_size`.

    compute: returns the answers to the jobs of a batch, in order, and runs in `executor`.

    No job waits for other jobs to arrive, so batches are small while the process is idle and full while it is busy. In
    contrast, `ray.serve.batch` closes a batch a few milliseconds after its first job, so under load it computes many
    small batches.
    """

    def __init__(
        self, compute: Callable[[Sequence[ImageJob]], Sequence[Answer]], max_size: int, executor: Executor
    ) -> None:
        self.compute, self.max_size, self.executor = compute, max_size, executor
        self._waiting: deque[tuple[ImageJob, asyncio.Future[Answer]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, jobs: Sequence[ImageJob]) -> list[Answer]:
        """Returns the answers to the jobs of a request, in order. Raises what `compute` raises.

        The jobs may be divided between batches. If the call is cancelled, its waiting jobs are not computed.
        """
        loop = asyncio.get_running_loop()
        added = [(job, loop.create_future()) for job in jobs]
        self._waiting.extend(added)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return list(await asyncio.gather(*(future for _, future in added)))

    async def _work(self) -> None:
        """Computes batches until no job waits."""
        while batch := self._next_batch():
            jobs = [job for job, _ in batch]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self.executor, self.compute, jobs)
            except Exception as error:  # each caller with a job in the batch gets the error
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _next_batch(self) -> list[tuple[ImageJob, asyncio.Future[Answer]]]:
        """Removes and returns the next jobs from the queue, without those whose calls were cancelled."""
        batch: list[tuple[ImageJob, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.max_size:
            job, future = self._waiting.popleft()
            if not future.done():
                batch.append((job, future))
        return batch
