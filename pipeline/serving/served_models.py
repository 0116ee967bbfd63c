"""The models of a server as its requests see them: images go in, one model's answer comes out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from PIL import Image

from models.transform import ImageTransform
from pipeline.confidence.image_caption import Explanation, ImageCaption
from pipeline.serving.comparison import ComparisonLog
from pipeline.serving.limits import RefusedError
from pipeline.serving.metrics import Metrics
from pipeline.untrusted.names import quoted

MAX_ATTEMPTS = 3  # of a request whose model is replaced meanwhile
MAX_COMPARED = 8  # requests to the challenger at a time; more are left out
logger = logging.getLogger(__name__)


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
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Captioners(Protocol):
    """The processes that caption with one model. Methods raise RefusedError with status 503 if none answers."""

    async def describe(self) -> tuple[dict[str, Any], ImageTransform]:
        """`ModelHost.describe`."""
        ...

    async def caption(self, job: ImageJob) -> Answer:
        """The answer to one job of `ModelHost.caption`."""
        ...

    async def explain(self, job: ExplainJob) -> Answer:
        """`ModelHost.explain`."""
        ...


class ServedModel:
    """One model by the name that clients choose. It resizes images as the model needs them."""

    def __init__(self, name: str, captioners: Captioners, metrics: Metrics) -> None:
        self.name, self.captioners, self.metrics = name, captioners, metrics
        self._transform: ImageTransform | None = None

    async def describe(self) -> dict[str, Any]:
        """The model's description for GET /models."""
        description, self._transform = await self.captioners.describe()
        return {"name": self.name} | description

    async def caption(self, images: Sequence[Image.Image], search: Search) -> list[Made]:
        """The captions of each image, all by one model, also while it is replaced. Raises RefusedError."""
        for _ in range(MAX_ATTEMPTS):
            answers = await asyncio.gather(*(self._caption(image, search) for image in images))
            for answer in answers:
                if answer.batch_index == 0:
                    self.metrics.batches.labels(self.name).observe(answer.batch_size)
            if len({answer.digest for answer in answers}) == 1:
                self.metrics.images.labels(self.name).inc(len(answers))
                return answers
        raise RefusedError(503, "the model is being replaced; try again", 1)

    async def _caption(self, image: Image.Image, search: Search) -> Made:
        async def send(pixels: Any, key: str) -> Answer:
            return await self.captioners.caption(ImageJob(pixels, key, search))

        return await self._resized(image, send)

    async def explain(self, image: Image.Image, caption: str | None, head: int | None, attribution: bool) -> Made:
        """Where the model looks in an image for each word. Raises RefusedError."""

        async def send(pixels: Any, key: str) -> Answer:
            return await self.captioners.explain(ExplainJob(pixels, key, caption, head, attribution))

        return await self._resized(image, send)

    async def _resized(self, image: Image.Image, send: Any) -> Made:
        """The answer of `send` to the image's pixels, which are resized again if the model was replaced."""
        if self._transform is None:
            await self.describe()
        for _ in range(MAX_ATTEMPTS):
            transform = cast("ImageTransform", self._transform)
            pixels = await asyncio.to_thread(transform.resize, image)
            answer = await send(pixels, transform_key(transform))
            if isinstance(answer, Made):
                return answer
            if isinstance(answer, RefusedError):
                raise answer
            self._transform = cast("StaleTransform", answer).transform
        raise RefusedError(503, "the model is being replaced; try again", 1)


@dataclass(frozen=True)
class Challenger:
    """A model that gets a share of the requests, too. Its answers are logged and not sent to clients."""

    model: ServedModel
    share: float
    log: ComparisonLog


class ServedModels:
    """All models of a server; the first is the default. A challenger is compared with the default."""

    def __init__(self, models: Mapping[str, ServedModel], metrics: Metrics, challenger: Challenger | None) -> None:
        self.models, self.metrics, self.challenger = dict(models), metrics, challenger
        self.default = next(iter(models))
        self._compared: set[asyncio.Task[None]] = set()

    def choose(self, name: str | None) -> ServedModel:
        """The model of a name; None for the default. Raises RefusedError."""
        found = self.models.get(self.default if name is None else name)
        if found is None:
            raise RefusedError(422, f"there is no model {quoted(name)}; GET /models lists them")
        return found

    async def describe(self) -> list[dict[str, Any]]:
        """The descriptions of all models."""
        return list(await asyncio.gather(*(model.describe() for model in self.models.values())))

    def compare(
        self, images: Sequence[bytes], pictures: Sequence[Image.Image], search: Search, made: list[Made]
    ) -> None:
        """Sends a share of the requests to the challenger, too, and logs both answers when it has answered.

        made: the answer of the default model, which the client gets without waiting for the challenger.
        """
        challenger = self.challenger
        if challenger is None or random.random() >= challenger.share:
            return
        if len(self._compared) >= MAX_COMPARED:
            self.metrics.compared.labels("left out").inc()
            return
        task = asyncio.create_task(_compare(challenger, images, pictures, search, (self.default, made), self.metrics))
        self._compared.add(task)  # asyncio keeps no task alive by itself
        task.add_done_callback(self._compared.discard)


def _compare(
    challenger: Challenger,
    images: Sequence[bytes],
    pictures: Sequence[Image.Image],
    search: Search,
    answered: tuple[str, list[Made]],
    metrics: Metrics,
) -> Coroutine[Any, Any, None]:
    """Captions with the challenger and logs both answers. answered: the default model's name and answers."""

    async def compare() -> None:
        entry: dict[str, Any] = {"time": round(time.time(), 3)}
        entry["images"] = [hashlib.sha256(data).hexdigest() for data in images]
        entry["champion"] = _logged(*answered)
        try:
            entry["challenger"] = _logged(challenger.model.name, await challenger.model.caption(pictures, search))
            await asyncio.to_thread(challenger.log.append, entry)
            metrics.compared.labels("logged").inc()
        except (RefusedError, OSError) as error:
            metrics.compared.labels("failed").inc()
            logger.warning(f"the challenger was not compared: {error}")

    return compare()


def _logged(name: str, made: Sequence[Made]) -> dict[str, Any]:
    """One side of a line of the comparison log."""
    captions = [cast("ImageCaption", each.result).to_json() for each in made]
    return {"model": name, "bundle": made[0].bundle, "digest": made[0].digest, "captions": captions}
