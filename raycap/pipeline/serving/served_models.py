"""The models of a server as its requests see them: images go in, one model's answer comes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeVar, cast

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.image_sources import load_image
from raycap.pipeline.data.images import BadImage, OversizedError, UnknownFormatError
from raycap.pipeline.evaluation.results import Explanation, ImageCaption
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.serving.limits import RefusedError

MAX_ATTEMPTS = 3  # of a request whose model is replaced meanwhile
DECODERS = 2  # images that are decoded at a time; each may need 8 bytes per pixel of the limit
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
T = TypeVar("T")


class Metrics:
    """The counters of one server. Paths are those of its routes; others count as "other"."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "raycap_requests", "Requests by path and status.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "raycap_request_seconds", "Time of requests.", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.in_progress = Gauge("raycap_requests_in_progress", "Requests in progress.", registry=self.registry)
        self.images = Counter("raycap_images", "Captioned images by model.", ["model"], registry=self.registry)
        self.batches = Histogram(
            "raycap_batch_size", "Images per forward pass.", ["model"], buckets=SIZES, registry=self.registry
        )

    def text(self) -> tuple[bytes, str]:
        """All counters, and the content type of the text."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class Decoder:
    """Decodes the images of all requests, a few at a time, and resizes them.

    A server holds image files and resized images, and never the decoded images of a whole request. A file is decoded
    again for each model. What a request that has ended still waits for is not decoded.
    """

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self._threads = ThreadPoolExecutor(DECODERS, "decoder")

    async def resized(self, data: bytes, transform: ImageTransform) -> np.ndarray:
        """The pixels (H, W, 3) uint8 of an image file for a model. Raises BadImage."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: transform.resize(load_image(data, self.max_pixels)))


@dataclass(frozen=True)
class ImageFile:
    """An image of a request. name: for messages. refusal: the sentence for any file that cannot be used."""

    name: str
    data: bytes
    decoder: Decoder
    refusal: str | None = None

    async def resized(self, transform: ImageTransform) -> np.ndarray:
        """The pixels (H, W, 3) uint8 for a model. Raises RefusedError."""
        try:
            return await self.decoder.resized(self.data, transform)
        except BadImage as error:
            if self.refusal is not None:
                raise RefusedError(422, self.refusal) from None
            kinds = ((OversizedError, 413), (UnknownFormatError, 415), (BadImage, 422))
            status = next(status for kind, status in kinds if isinstance(error, kind))
            raise RefusedError(status, f"{self.name}: {error}") from None


async def all_of(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results of calls that run at the same time. If one raises an error, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class Search:
    """The search of a request; None for the model's values. Images with equal searches share a batch."""

    beam_size: int | None = None
    num_results: int = 1
    max_length: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class ImageJob:
    """One image to caption. pixels: (H, W, 3) uint8, resized by the transform with this key."""

    pixels: np.ndarray
    transform_key: str
    search: Search = Search()


@dataclass(frozen=True)
class ExplainJob:
    """One image to explain. The fields are those of `ExplainOptions`."""

    pixels: np.ndarray
    transform_key: str
    caption: str | None = None
    head: int | None = None
    attribution: bool = False


@dataclass(frozen=True)
class Made:
    """A result, and what made it. batch_size: the images of its forward pass; batch_index: its place there."""

    result: ImageCaption | Explanation
    bundle: str
    digest: str
    batch_size: int = 1
    batch_index: int = 0


@dataclass(frozen=True)
class StaleTransform:
    """The answer to pixels of another transform: the model was replaced. transform: the one to use."""

    transform: ImageTransform


Answer = Made | StaleTransform | RefusedError


def transform_key(transform: ImageTransform) -> str:
    """Tells transforms apart."""
    text = json.dumps(transform.describe() | {"image_size": transform.image_size}, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


class Captioners(Protocol):
    """The processes that caption with one model. Methods raise RefusedError with status 503 if none answers."""

    async def describe(self) -> tuple[Values, ImageTransform]:
        """`ModelHost.describe`."""
        ...

    async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
        """`ModelHost.caption`, for the images of one request."""
        ...

    async def explain(self, job: ExplainJob) -> Answer:
        """`ModelHost.explain`."""
        ...


class ServedModel:
    """One model by the name that clients choose. It resizes images as the model needs them."""

    def __init__(self, name: str, captioners: Captioners, metrics: Metrics) -> None:
        self.name, self.captioners, self.metrics = name, captioners, metrics
        self._transform: ImageTransform | None = None

    async def describe(self) -> Values:
        """The model's description for GET /models."""
        description, self._transform = await self.captioners.describe()
        return {"name": self.name} | description

    async def caption(self, images: Sequence[ImageFile], search: Search) -> list[Made]:
        """The captions of each image, all by one model, also while it is replaced. Raises RefusedError."""

        async def send(pixels: list[np.ndarray], key: str) -> list[Answer]:
            return await self.captioners.caption([ImageJob(each, key, search) for each in pixels])

        made = await self._answered(images, send)
        for each in made:
            if each.batch_index == 0:
                self.metrics.batches.labels(self.name).observe(each.batch_size)
        self.metrics.images.labels(self.name).inc(len(made))
        return made

    async def explain(self, image: ImageFile, caption: str | None, head: int | None, attribution: bool) -> Made:
        """Where the model looks in an image for each word. Raises RefusedError."""

        async def send(pixels: list[np.ndarray], key: str) -> list[Answer]:
            return [await self.captioners.explain(ExplainJob(pixels[0], key, caption, head, attribution))]

        return (await self._answered([image], send))[0]

    async def _answered(
        self, images: Sequence[ImageFile], send: Callable[[list[np.ndarray], str], Awaitable[list[Answer]]]
    ) -> list[Made]:
        """The answers of `send` to the images' pixels, all of one model. It is called again if the model is replaced.

        Raises RefusedError.
        """
        if self._transform is None:
            await self.describe()
        for _ in range(MAX_ATTEMPTS):
            transform = cast("ImageTransform", self._transform)
            pixels = await all_of(image.resized(transform) for image in images)
            answers = await send(pixels, transform_key(transform))
            for answer in answers:
                if isinstance(answer, RefusedError):
                    raise answer
                if isinstance(answer, StaleTransform):
                    self._transform = answer.transform
            made = [answer for answer in answers if isinstance(answer, Made)]
            if len(made) == len(answers) and len({each.digest for each in made}) == 1:
                return made
        raise RefusedError(503, "the model is being replaced; try again", 1)


class ServedModels:
    """All models of a server; the first is the default."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self.models, self.default = dict(models), next(iter(models))

    def choose(self, name: str | None) -> ServedModel:
        """The model of a name; None for the default. Raises RefusedError."""
        found = self.models.get(self.default if name is None else name)
        if found is None:
            raise RefusedError(422, f"there is no model {quoted(name)}; GET /models lists them")
        return found

    async def describe(self) -> list[Values]:
        """The descriptions of all models."""
        return await all_of(model.describe() for model in self.models.values())
