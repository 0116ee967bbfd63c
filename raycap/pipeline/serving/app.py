"""The HTTP interface of `raycap serve`, without Ray: routes, decoding, answers, the OpenAPI document and the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from raycap.pipeline.data.image_sources import UriRoots
from raycap.pipeline.evaluation.captions import Explanation, ImageCaption
from raycap.pipeline.serving.bodies import Options, Source, parse_body, read_body
from raycap.pipeline.serving.forms import (
    CaptionAnswer,
    CaptionBody,
    CaptionEntry,
    CaptionOptions,
    Error,
    ExplainAnswer,
    ExplainBody,
    ExplainOptions,
    ModelEntry,
    ModelsAnswer,
)
from raycap.pipeline.serving.guard import FAILED, Access, Guard, error_parts
from raycap.pipeline.serving.limits import Limits, RefusedError
from raycap.pipeline.serving.metrics import Metrics
from raycap.pipeline.serving.served_models import Decoder, ImageFile, Made, Search, ServedModel, ServedModels
from raycap.pipeline.storage.s3 import StorageOptions

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 500, 503)
}
PAGE = Path(__file__).with_name("caption_page.html")


@dataclass(frozen=True)
class AppSettings:
    """The settings of an app. allow_attribution: whether clients may ask for integrated gradients, which take minutes.

    uris, options: of `UriRoots`.
    """

    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    access: Access = Access()  # noqa: RUF009 (frozen)
    uris: tuple[str, ...] = ()
    allow_attribution: bool = False
    options: StorageOptions = StorageOptions()


class Routes:
    """The functions behind the routes."""

    def __init__(self, models: ServedModels, settings: AppSettings, metrics: Metrics) -> None:
        self.models, self.settings, self.metrics = models, settings, metrics
        uris = UriRoots(settings.uris, settings.options)
        self.source = Source(settings.limits, uris, Decoder(settings.limits.pixels))

    async def caption(self, request: Request) -> CaptionAnswer:
        """Captions images."""
        options, images = await self._read(request, CaptionBody, CaptionOptions)
        self._check_search(options)
        async with _deadline(self.settings.limits.answer_s):
            model = self.models.choose(options.model)
            search = Search(options.beam_size, options.num_results, options.max_length, options.precision)
            made = await model.caption(images, search)
        entries = [cast("ImageCaption", each.result).to_json() for each in made]
        hidden = set() if options.confidence else {"confidence", "expected_ciderd"}
        captions = [
            CaptionEntry.model_validate({key: value for key, value in entry.items() if key not in hidden})
            for entry in entries
        ]
        return CaptionAnswer(model=_entry(model, made), captions=captions)

    async def explain(self, request: Request) -> ExplainAnswer:
        """Explains the words of an image's caption."""
        options, images = await self._read(request, ExplainBody, ExplainOptions)
        if len(images) != 1:
            raise RefusedError(422, f"the request has {len(images)} images; send one to explain")
        if options.attribution and not self.settings.allow_attribution:
            raise RefusedError(422, "attribution is not enabled on this server; leave it out for attention alone")
        async with _deadline(self.settings.limits.answer_s * (10 if options.attribution else 1)):
            model = self.models.choose(options.model)
            made = await model.explain(images[0], options.caption, options.head, options.attribution)
        found = cast("Explanation", made.result)
        return ExplainAnswer(
            model=_entry(model, [made]),
            caption=found.caption,
            words=list(found.words),
            grid=found.grid,
            attention=_rows(found.attention),
            attribution=None if found.attribution is None else _rows(found.attribution),
            steps=found.steps,
            gap=round(found.gap, 6),
        )

    async def list_models(self) -> ModelsAnswer:
        """Lists the models."""
        async with _deadline(self.settings.limits.answer_s):
            return ModelsAnswer(default=self.models.default, models=await self.models.describe())

    async def _read(
        self, request: Request, json_form: type[Options], options: type[Options]
    ) -> tuple[Any, list[ImageFile]]:
        """The options and image files of a request."""
        body = await read_body(request.stream(), request.headers, self.settings.limits)
        return await parse_body(body, request.headers.get("content-type", ""), self.source, json_form, options)

    def _check_search(self, options: CaptionOptions) -> None:
        """Raises RefusedError for a search above the limits."""
        limits = self.settings.limits
        for name in ("beam_size", "num_results"):
            value, most = getattr(options, name), getattr(limits, name)
            if value is not None and value > most:
                raise RefusedError(422, f"{name} is {value}; this server allows up to {most}")


class _deadline:
    """A block that ends with RefusedError after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.timeout = seconds, asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self.timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self.timeout.__aexit__(*raised)
        except TimeoutError:
            raise RefusedError(503, f"there was no answer within {self.seconds:g} s; try again later", 5) from None


def make_app(models: ServedModels, settings: AppSettings, metrics: Metrics) -> Guard:
    """The ASGI application of a server."""
    app = FastAPI(title="raycap", docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = Routes(models, settings, metrics)
    for path, endpoint, answer, forms in (
        ("/caption", routes.caption, CaptionAnswer, (CaptionBody, CaptionOptions)),
        ("/explain", routes.explain, ExplainAnswer, (ExplainBody, ExplainOptions)),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=answer,
            response_model_exclude_none=path == "/caption",
            responses=REFUSALS,
            openapi_extra={"requestBody": _request_body(*forms)},
        )
    app.add_api_route("/models", routes.list_models, response_model=ModelsAnswer, responses=REFUSALS)
    app.add_api_route("/healthz", _healthz)

    async def metrics_text() -> Response:
        """Counters in Prometheus' format."""
        text, kind = metrics.text()
        return Response(text, media_type=kind)

    async def index() -> Response:
        """The page."""
        return HTMLResponse(page_html(), headers={"Content-Security-Policy": content_security_policy()})

    app.add_api_route("/metrics", metrics_text, response_class=Response, responses=REFUSALS)
    app.add_api_route("/", index, response_class=HTMLResponse, include_in_schema=False)
    for kind in (HTTPException, RefusedError, Exception):
        app.add_exception_handler(kind, _refuse)
    return Guard(cast("Any", app), settings.access, settings.limits, metrics)


async def _healthz() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


async def _refuse(_: Request, error: Exception) -> Response:
    """The answer to a request that was refused, here or by Starlette, or that failed; the guard logs a failure."""
    refused = RefusedError(500, FAILED)
    if isinstance(error, HTTPException):
        sentences = {404: "there is no such path", 405: "this path has another method"}
        refused = RefusedError(error.status_code, sentences.get(error.status_code, str(error.detail)))
    elif isinstance(error, RefusedError):
        refused = error
    body, headers = error_parts(refused)
    return Response(body, refused.status, headers)


def _entry(model: ServedModel, made: Sequence[Made]) -> ModelEntry:
    return ModelEntry(name=model.name, bundle=made[0].bundle, digest=made[0].digest)


def _rows(array: np.ndarray) -> list[list[float]]:
    """(W, N) as JSON values with 6 significant digits. A number that is not finite becomes 0."""
    return [[float(f"{value:.6g}") for value in row] for row in np.nan_to_num(array, posinf=0, neginf=0).tolist()]


def _request_body(json_form: Any, options: Any) -> dict[str, Any]:
    """The OpenAPI description of a body, as JSON or as multipart files."""
    fields = options.model_json_schema()
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form = fields | {"properties": {"images": files} | fields["properties"], "required": ["images"]}
    return {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": form},
            "application/json": {"schema": json_form.model_json_schema()},
        },
    }


@lru_cache
def page_html() -> str:
    """The HTML of the page, one file without anything from elsewhere."""
    return PAGE.read_text(encoding="utf-8")


@lru_cache
def content_security_policy() -> str:
    """A policy that allows the page's own style and script, images that the user chose, and requests to the server."""
    digests = {}
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page_html(), re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
