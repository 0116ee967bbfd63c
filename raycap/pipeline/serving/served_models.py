"""Answers requests with the models of a server: decodes the image files and asks a model for the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.image_sources import load_image
from raycap.pipeline.data.images import BadImage, OversizedError, UnknownFormatError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.serving.host import Answer, ImageJob, Made, RefusedError, Search

MAX_ATTEMPTS = 3  # for a request whose model is being replaced
DECODERS = 2  # images decoded at the same time; few, because each may need 8 bytes per pixel
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)

# Calls a method in one of a model's processes. The first argument is the method's name, followed by its arguments:
#   describe() returns the model's description and its transform,
#   caption(jobs) returns a list of `Answer`,
#   explain(jobs, caption, head) takes a list of one job and returns a list of one `Answer`.
# Raises RefusedError with status 503 if no process answers.
Captioners = Callable[..., Awaitable[Any]]


class Metrics:
    """The Prometheus metrics of a server. The label "path" is one of the server's routes, or "other"."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("raycap_requests", "Requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "raycap_request_seconds", "Time of requests.", ["path"], buckets=SECONDS, registry=registry
        )
        self.in_progress = Gauge("raycap_requests_in_progress", "Requests in progress.", registry=registry)
        self.images = Counter("raycap_images", "Captioned images.", ["model"], registry=registry)
        self.batches = Histogram(
            "raycap_batch_size", "Images per forward pass.", ["model"], buckets=SIZES, registry=registry
        )


class ServedModels:
    """The models of a server by the names that clients choose. The first model is the default.

    Images of all requests are decoded and resized a few at a time, because the decoded images of a whole request may
    not fit into memory.
    """

    def __init__(self, captioners: Mapping[str, Captioners], metrics: Metrics, max_pixels: int) -> None:
        self.captioners, self.default, self.metrics = captioners, next(iter(captioners)), metrics
        self.max_pixels = max_pixels
        self._threads = ThreadPoolExecutor(DECODERS, "decoder")
        self._transforms: dict[str, ImageTransform] = {}

    def choose(self, name: str | None) -> str:
        """Returns `name`, or the default model's name if it is None. Raises RefusedError if there is no such model."""
        if name is not None and name not in self.captioners:
            raise RefusedError(422, f"there is no model {quoted(name)}; GET /models lists them")
        return self.default if name is None else name

    async def describe(self) -> list[Values]:
        """The descriptions of all models for GET /models."""
        return await asyncio.gather(*(self._describe(model) for model in self.captioners))

    async def _describe(self, model: str) -> Values:
        description, self._transforms[model] = await self.captioners[model]("describe")
        return {"name": model} | description

    async def caption(self, model: str, images: Sequence[bytes], search: Search) -> list[Made]:
        """Captions image files. All captions come from the same bundle. Raises RefusedError if the request fails."""
        made = await self._answers(model, images, search, "caption")
        for each in made:
            if each.batch_index == 0:
                self.metrics.batches.labels(model).observe(each.batch_size)
        self.metrics.images.labels(model).inc(len(made))
        return made

    async def explain(self, model: str, image: bytes, caption: str | None, head: int | None) -> Made:
        """The model's attention to an image for each word of a caption. Raises RefusedError if the request fails."""
        return (await self._answers(model, [image], Search(), "explain", caption, head))[0]

    async def _answers(
        self, model: str, images: Sequence[bytes], search: Search, method: str, *arguments: object
    ) -> list[Made]:
        """Calls a method for images. If the model was replaced meanwhile, calls it again for all images."""
        loop = asyncio.get_running_loop()
        for _ in range(MAX_ATTEMPTS):
            if model not in self._transforms:
                await self._describe(model)
            transform = self._transforms[model]
            jobs = []
            for number, image in enumerate(images):  # one at a time, because the request may time out before the last
                pixels = await loop.run_in_executor(self._threads, self._resized, image, number, transform)
                jobs.append(ImageJob(pixels, transform, search))
            answers: list[Answer] = await self.captioners[model](method, jobs, *arguments)
            for answer in answers:
                if isinstance(answer, RefusedError):
                    raise answer
            made = [answer for answer in answers if isinstance(answer, Made)]
            digests = {each.info.digest for each in made}
            if len(made) == len(images) and len(digests) == 1:  # all answers are of one model
                return made
            self._transforms.pop(model, None)  # the new model may have another transform
        raise RefusedError(503, "the model is being replaced; try again", 1)

    def _resized(self, image: bytes, number: int, transform: ImageTransform) -> np.ndarray:
        """Decodes and resizes an image file to (H, W, 3) uint8. Raises RefusedError. number: its index, for errors."""
        try:
            return transform.resize(load_image(image, self.max_pixels))
        except BadImage as error:
            statuses: dict[type, int] = {OversizedError: 413, UnknownFormatError: 415}
            raise RefusedError(statuses.get(type(error), 422), f"image {number}: {error}") from None
