"""The model in a captioning process: batches of requests, and its replacement while it serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.captions import ImageCaption
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.guard import FAILED
from raycap.pipeline.serving.limits import RefusedError
from raycap.pipeline.serving.loading import LoadedModel
from raycap.pipeline.serving.served_models import (
    Answer,
    ExplainJob,
    ImageJob,
    Made,
    Search,
    StaleTransform,
    transform_key,
)

logger = logging.getLogger(__name__)


class ModelHost:
    """Captions batches with a model that can be replaced between two batches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._warm(loaded.service)
        self._current = loaded

    @property
    def current(self) -> LoadedModel:
        """The model that captions now."""
        return self._current

    def replace(self, loaded: LoadedModel) -> None:
        """Warms another model up, and lets it take over. The batch that is being captioned keeps the old one."""
        self._warm(loaded.service)
        self._current = loaded

    def describe(self) -> tuple[dict[str, Any], ImageTransform]:
        """The description of the current model, and its transform."""
        current = self._current
        return current.describe(), current.service.transform

    def caption(self, jobs: Sequence[ImageJob]) -> list[Answer]:
        """The captions of each image, by one model. Images with equal searches share a forward pass."""
        current = self._current
        key = transform_key(current.service.transform)
        answers: list[Answer] = [StaleTransform(current.service.transform)] * len(jobs)
        groups: dict[Search, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.transform_key == key:
                groups.setdefault(job.search, []).append(index)
        for search, indices in groups.items():
            made = self._answers(current, [jobs[index].pixels for index in indices], search)
            for index, answer in zip(indices, made, strict=True):
                answers[index] = answer
        return answers

    def explain(self, job: ExplainJob) -> Answer:
        """Where the model looks for each word of a caption of one image."""
        current = self._current
        service = current.service
        if job.transform_key != transform_key(service.transform):
            return StaleTransform(service.transform)
        pixels = _normalized(service, [job.pixels])
        caption = job.caption
        if caption is None:
            caption = service.caption(pixels)[0].caption or ""
        try:
            explanation = service.explain(pixels[0], caption, job.head, job.attribution)
        except UserError as error:
            return RefusedError(422, one_line(error))
        return Made(explanation, current.name, current.digest)

    @staticmethod
    def _answers(current: LoadedModel, pixels: Sequence[np.ndarray], search: Search) -> list[Answer]:
        """The answers to the images (H, W, 3) of one forward pass. A failure is not one of the rest of the batch."""
        try:
            found = _captions(current.service, pixels, search)
        except UserError as error:
            return [RefusedError(422, one_line(error))] * len(pixels)
        except Exception as error:  # such as a search that needs more memory than the device has
            logger.exception(f"{len(pixels)} images were not captioned: {without_secrets(one_line(error))}")
            return [RefusedError(500, FAILED)] * len(pixels)
        return [Made(result, current.name, current.digest, len(pixels), place) for place, result in enumerate(found)]

    @staticmethod
    def _warm(service: CaptionService) -> None:
        """Captions a black image, so that the first request does not wait for what happens once."""
        side = service.transform.image_size
        _captions(service, [np.zeros((side, side, 3), np.uint8)], Search())


def _captions(service: CaptionService, pixels: Sequence[np.ndarray], search: Search) -> list[ImageCaption]:
    """The captions of images (H, W, 3) uint8. When the GPU's memory runs out, half of them are captioned at a time.

    Raises UserError for a search that the model does not take.
    """
    given = {"beam_size": search.beam_size, "max_length": search.max_length}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = service.changed_search(changes, search.num_results)
    try:
        return service.caption(_normalized(service, pixels), settings, search.precision)
    except torch.OutOfMemoryError:
        if len(pixels) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(pixels) // 2
    return [*_captions(service, pixels[:half], search), *_captions(service, pixels[half:], search)]


def _normalized(service: CaptionService, pixels: Sequence[np.ndarray]) -> torch.Tensor:
    """(B, 3, H, W), on the service's device."""
    stacked = torch.from_numpy(np.stack(pixels)).to(service.device)
    return service.transform.normalize(stacked).contiguous()
