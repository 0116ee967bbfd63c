"""The bodies of requests and answers, as in the OpenAPI document. Reads bodies within limits."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, Field, ValidationError
from starlette.types import Message

from raycap.pipeline.runtime.names import shown
from raycap.pipeline.serving.host import RefusedError
from raycap.pipeline.serving.settings import Limits

MAX_CAPTION = 1000  # characters of a caption to explain
MAX_FIELDS, MAX_FIELD_BYTES = 20, 10_000  # of a body, without its files


class RequestForm(BaseModel, extra="forbid"):
    """The fields of all requests. images: the contents of image files."""

    images: list[bytes] = []
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


async def read_form(request: Request, form: type[Form], limits: Limits) -> Form:
    """Reads the form in a multipart body. Fields with files may have any name.

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
    try:
        async with asyncio.timeout(limits.body_s):
            sizes = {"max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
            async with limited.form(max_files=limits.images, **sizes) as parts:
                values = [value for _, value in parts.multi_items() if not isinstance(value, str)]
                images = [await value.read() for value in values]
                fields = {name: value for name, value in parts.items() if isinstance(value, str)}
            return form.model_validate(fields | {"images": images})
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
