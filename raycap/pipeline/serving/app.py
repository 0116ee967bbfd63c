"""The HTTP interface of `raycap serve`, without Ray: forms, models, routes, access, counters, the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar, cast

import numpy as np
from fastapi import Depends, FastAPI, Request, UploadFile
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Message

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.data.image_sources import load_image
from raycap.pipeline.data.images import BadImage, OversizedError, UnknownFormatError
from raycap.pipeline.evaluation.results import Explanation, ImageCaption
from raycap.pipeline.runtime.names import one_line, quoted, shown
from raycap.pipeline.runtime.processor import free_memory_mb
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.address import LOOPBACK_HOSTS, Limits, ServeArguments
from raycap.pipeline.serving.host import FAILED, Answer, ImageJob, Made, RefusedError, Search

PAGE = Path(__file__).with_name("caption_page.html")
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
CLIENT_LEFT = 499  # the status that is counted for a client that has disconnected
MAX_CAPTION = 1000  # characters of a caption to explain
MAX_FIELDS, MAX_FIELD_BYTES = 20, 10_000  # of a body, without its files
MAX_ATTEMPTS = 3  # for a request whose model is being replaced
BODIES_SHARE = 1 / 8  # of the free memory for bodies, because Ray and this process may have three copies of a byte
DECODERS = 2  # images decoded at the same time; few, because each may need 8 bytes per pixel
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
logger = logging.getLogger(__name__)

# Calls a method in one of a model's processes. The first argument is the method's name, followed by its arguments:
#   describe() returns the model's description and its transform,
#   caption(jobs) returns a list of `Answer`,
#   explain(jobs, caption, head) takes a list of one job and returns a list of one `Answer`.
# Raises RefusedError with status 503 if no process answers.
Captioners = Callable[..., Awaitable[Any]]


class RequestForm(BaseModel, extra="forbid"):
    """The fields of all requests."""

    images: list[UploadFile] = []
    model: str | None = Field(None, max_length=64, description="The model's name; by default the server's first model.")


Form = TypeVar("Form", bound=RequestForm)


class CaptionForm(RequestForm):
    """The body of POST /caption. If a field is not given, the model's own value is used."""

    beam_size: int | None = Field(None, ge=1)
    num_results: int = Field(1, ge=1, description="Captions per image.")
    max_length: int | None = Field(None, ge=3, le=10_000, description="Tokens per caption, with begin and end.")


class ExplainForm(RequestForm):
    """The body of POST /explain, with one image."""

    caption: str | None = Field(None, max_length=MAX_CAPTION, description="By default the model's best caption.")
    head: int | None = Field(None, ge=0, le=1000, description="Of the last decoder layer; by default the mean of all.")


class RankedEntry(BaseModel):
    """A caption with the sum of its tokens' log-probabilities in nats."""

    caption: str
    log_prob: float


class CaptionEntry(RankedEntry):
    """The captions of one image, with the confidence in the best one."""

    confidence: float | None = None
    expected_ciderd: float | None = None
    n_best: list[RankedEntry] | None = None


class ModelEntry(BaseModel):
    """The model that made an answer. bundle: the name of its bundle. digest: 16 digits of its weights' SHA-256."""

    name: str
    bundle: str
    digest: str


class CaptionAnswer(BaseModel):
    model: ModelEntry
    captions: list[CaptionEntry]


class ExplainAnswer(BaseModel):
    """The model's attention. grid: rows and columns of image tokens. attention: one number per word and image token."""

    model: ModelEntry
    caption: str
    words: list[str]
    grid: tuple[int, int]
    attention: list[list[float]]


class ModelsAnswer(BaseModel):
    default: str
    models: list[dict[str, object]]


class Error(BaseModel):
    error: str


def described_body(form: type[RequestForm]) -> dict[str, object]:
    """The OpenAPI description of a multipart body with image files."""
    schema = form.model_json_schema() | {"required": ["images"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@asynccontextmanager
async def read_form(request: Request, form: type[Form], limits: Limits) -> AsyncIterator[Form]:
    """Reads the form in a multipart body, whose files are open within the context. Fields with files may have any name.

    Raises RefusedError if the body has another type, does not fit the form, has more than `body_bytes` bytes (its rest
    is not read), or takes longer than `body_s`. Raises Starlette's HTTPException if the multipart parser refuses it.
    """
    left = limits.body_bytes

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise RefusedError(
                413, f"the request has more than {limits.body_bytes} bytes; send fewer or smaller images"
            )
        return message

    limited = Request(request.scope, receive)
    content_type = request.headers.get("content-type", "missing")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise RefusedError(415, f"Content-Type is {shown(content_type)}; send image files as multipart/form-data")
    async with AsyncExitStack() as context:
        context.push_async_callback(limited.close)
        try:
            async with asyncio.timeout(limits.body_s):
                sizes = {"max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
                parts = await limited.form(max_files=limits.images, **sizes)
            images = [value for _, value in parts.multi_items() if not isinstance(value, str)]
            fields = {name: value for name, value in parts.items() if isinstance(value, str)}
            found = form.model_validate(fields | {"images": images})
        except TimeoutError:
            raise RefusedError(408, f"the request did not arrive within {limits.body_s:g} s") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                problem = f"there is no such field; the fields are {', '.join(form.model_fields)}"
            else:
                problem = shown(first["msg"])
            raise RefusedError(422, f"{shown(place)}: {problem}") from None
        yield found


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

    Images of all requests are read, decoded and resized a few at a time, because all images of a request may not fit
    into memory. The files of larger images are on the disk meanwhile.
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

    async def caption(self, model: str, images: Sequence[IO[bytes]], search: Search) -> list[Made]:
        """Captions image files. All captions come from the same bundle. Raises RefusedError if the request fails."""
        made = await self._answers(model, images, search, "caption")
        for each in made:
            if each.batch_index == 0:
                self.metrics.batches.labels(model).observe(each.batch_size)
        self.metrics.images.labels(model).inc(len(made))
        return made

    async def explain(self, model: str, image: IO[bytes], caption: str | None, head: int | None) -> Made:
        """The model's attention to an image for each word of a caption. Raises RefusedError if the request fails."""
        return (await self._answers(model, [image], Search(), "explain", caption, head))[0]

    async def _answers(
        self, model: str, images: Sequence[IO[bytes]], search: Search, method: str, *arguments: object
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

    def _resized(self, image: IO[bytes], number: int, transform: ImageTransform) -> np.ndarray:
        """Decodes and resizes an image file to (H, W, 3) uint8. Raises RefusedError, which names the index `number`."""
        image.seek(0)
        try:
            return transform.resize(load_image(image.read(), self.max_pixels))
        except BadImage as error:
            statuses: dict[type, int] = {OversizedError: 413, UnknownFormatError: 415}
            raise RefusedError(statuses.get(type(error), 422), f"image {number}: {error}") from None


class Server:
    """The functions that answer requests, and their shared state: models, metrics, the queue and its bodies' memory."""

    def __init__(self, captioners: Mapping[str, Captioners], arguments: ServeArguments, token: str | None) -> None:
        self.limits, self.token = arguments.limits, token
        self.metrics = Metrics()
        self.models = ServedModels(captioners, self.metrics, self.limits.pixels)
        self.turns, self.is_stopping = asyncio.Semaphore(self.limits.queue), False
        self.free_bytes = self.most_bytes = int(free_memory_mb() * 2**20 * BODIES_SHARE)

    async def admit(self, request: Request, credentials: Credentials) -> None:
        """Raises RefusedError if a request has no access.

        If the server has a token, the request must have it. If the server has none, the request must not come from a
        page of another site, because such a page could send requests through a browser on this machine.
        """
        if self.token is None:
            origin = request.headers.get("origin")
            if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
                raise RefusedError(403, "requests of pages from elsewhere are refused")
            return
        # Tokens are compared in constant time, so that the time does not show how much of a wrong token is right.
        given = "" if credentials is None else credentials.credentials
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise RefusedError(401, "the header Authorization needs Bearer and the server's token")

    async def take_turn(self, request: Request) -> AsyncIterator[None]:
        """Counts a request as in progress until it has ended.

        Raises RefusedError if too many are in progress, or if their bodies may need too much memory. The size of a body
        is the one that its client declares. A single request is never too much.
        """
        if self.turns.locked():
            raise RefusedError(429, f"the server works on {self.limits.queue} requests; try again later", 1)
        length = request.headers.get("content-length", "")
        size = min(int(length) if length.isdecimal() else self.limits.body_bytes, self.limits.body_bytes)
        if size > self.free_bytes < self.most_bytes:
            raise RefusedError(503, "the server has no memory for further bodies of this size; try again later", 1)
        self.free_bytes -= size
        try:
            async with self.turns:
                with self.metrics.in_progress.track_inprogress():
                    yield
        finally:
            self.free_bytes += size

    async def stop(self) -> None:
        """Refuses all new requests, and returns when those in progress have been answered."""
        self.is_stopping = True
        for _ in range(self.limits.queue):
            await self.turns.acquire()

    async def caption(self, request: Request) -> CaptionAnswer:
        """Captions images."""
        async with read_form(request, CaptionForm, self.limits) as form, _deadline(self.limits.answer_s):
            for name in ("beam_size", "num_results"):
                value, most = getattr(form, name), getattr(self.limits, name)
                if value is not None and value > most:
                    raise RefusedError(422, f"{name} is {value}; this server allows up to {most}")
            model, images = self.models.choose(form.model), self._images(form)
            made = await self.models.caption(model, images, Search(form.beam_size, form.num_results, form.max_length))
        captions = [CaptionEntry.model_validate(cast("ImageCaption", each.result).to_json()) for each in made]
        return CaptionAnswer(model=_entry(model, made[0]), captions=captions)

    async def explain(self, request: Request) -> ExplainAnswer:
        """Explains the words of an image's caption."""
        async with read_form(request, ExplainForm, self.limits) as form, _deadline(self.limits.answer_s):
            model, images = self.models.choose(form.model), self._images(form)
            if len(images) != 1:
                raise RefusedError(422, f"the request has {len(images)} images; send one to explain")
            made = await self.models.explain(model, images[0], form.caption, form.head)
        found = cast("Explanation", made.result)
        return ExplainAnswer(
            model=_entry(model, made),
            caption=found.caption,
            words=list(found.words),
            grid=found.grid,
            attention=np.nan_to_num(found.attention.astype(float), posinf=0, neginf=0).round(6).tolist(),
        )

    async def list_models(self) -> ModelsAnswer:
        """Lists the models."""
        async with _deadline(self.limits.answer_s):
            return ModelsAnswer(default=self.models.default, models=await self.models.describe())

    def _images(self, form: RequestForm) -> list[IO[bytes]]:
        """The image files of a request. Raises RefusedError if there are none, or one is too large."""
        if not form.images:
            raise RefusedError(422, "the request has no image file; send one or more, as curl -F images=@FILE does")
        for number, image in enumerate(form.images):
            if (size := image.size or 0) > self.limits.image_bytes:
                raise RefusedError(413, f"image {number} has {size} bytes, more than {self.limits.image_bytes}")
        return [image.file for image in form.images]

    async def observe(self, request: Request, respond: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answers a request, and counts the answer and its time. A failure is logged and answered with one sentence."""
        begin, status = time.monotonic(), CLIENT_LEFT
        paths = {getattr(route, "path", "") for route in request.app.routes}
        path = request.url.path if request.url.path in paths else "other"
        try:
            stopping = RefusedError(503, "the server is stopping; try again later", 5)
            response = refuse(request, stopping) if self.is_stopping else await respond(request)
            status = response.status_code
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
        except Exception as error:
            logger.exception(f"a request to {path} failed: {without_secrets(one_line(error))}")
            response = refuse(request, RefusedError(500, FAILED))
            status = response.status_code
        finally:  # also runs if the server cancels the request
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - begin)
        response.headers.update(HEADERS)
        return response


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raises RefusedError in a `with` block that takes longer than a number of seconds."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RefusedError(503, f"there was no answer within {seconds:g} s; try again later", 5) from None


def make_app(captioners: Mapping[str, Captioners], arguments: ServeArguments, token: str | None) -> FastAPI:
    """The ASGI application of a server.

    captioners: by the name of the model, the default model first. token: the token that every request must have. If it
    is None, any client is answered. A server on the loopback interface without a token refuses requests whose Host
    header names another host. Otherwise a web page could reach the server by a host name that leads to this machine.
    """
    app = FastAPI(title="raycap", docs_url=None, redoc_url=None, redirect_slashes=False)
    server = app.state.server = Server(captioners, arguments, token)
    html = PAGE.read_text(encoding="utf-8")
    page_headers = {"Content-Security-Policy": content_security_policy(html)}

    async def metrics_text() -> Response:
        """Counters in Prometheus' format."""
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def index() -> Response:
        """The page, for which no token is needed, because the page contains no data of the server."""
        return HTMLResponse(html, headers=page_headers)

    # Options of routes: a closed one needs access, a queued one also its turn.
    closed: Values = {
        "dependencies": [Depends(server.admit)],
        "responses": {"4XX": {"model": Error}, "5XX": {"model": Error}},
    }
    queued = closed | {"dependencies": [*closed["dependencies"], Depends(server.take_turn)]}
    of_captions = queued | {"response_model_exclude_none": True}
    app.post("/caption", openapi_extra=described_body(CaptionForm), **of_captions)(server.caption)
    app.post("/explain", openapi_extra=described_body(ExplainForm), **queued)(server.explain)
    app.add_api_route("/models", server.list_models, **closed)
    app.add_api_route("/metrics", metrics_text, response_class=Response, **closed)
    app.add_api_route("/", index, response_class=HTMLResponse, include_in_schema=False)
    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(RefusedError, refuse)
    if arguments.loopback_only and token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_HOSTS, "[::1]"], www_redirect=False)
    app.middleware("http")(server.observe)
    return app


def refuse(_: Request, error: Exception) -> Response:
    """The answer to a request that raised RefusedError, or HTTPException of Starlette: one sentence as JSON."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", "another method")  # Starlette names the methods there
        sentences = {404: "there is no such path", 405: f"this path answers {allowed} only"}
        sentence = sentences.get(error.status_code, str(error.detail))
        return JSONResponse({"error": sentence}, error.status_code, headers)
    assert isinstance(error, RefusedError)
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in (408, 413):
        headers["Connection"] = "close"  # closed, because the rest of the body is not read
    return JSONResponse({"error": str(error)}, error.status, headers)


def _entry(model: str, made: Made) -> ModelEntry:
    return ModelEntry(name=model, bundle=made.info.bundle, digest=made.info.digest)


def content_security_policy(html: str) -> str:
    """A policy that allows only the page's own style and script, images of the user, and requests to this server."""
    digests = {}
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
