"""Reads the body of a request within limits: multipart files, or JSON with base64 and URIs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from raycap.pipeline.data.image_sources import UriRoots
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, quoted, shown
from raycap.pipeline.serving.limits import Limits, RefusedError
from raycap.pipeline.serving.served_models import Decoder, ImageFile
from raycap.pipeline.storage.untrusted.documents import parse_json

MAX_FIELDS = 20  # of a multipart body, besides its files
MAX_FIELD_BYTES = 10_000
MAX_JSON_VALUES = 20_000  # a value of 2 bytes takes 50 or more in Python, and 500 in the error of a form
Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Source:
    """Where the images of requests come from, how many and large they may be, and what decodes them."""

    limits: Limits
    uri_roots: UriRoots
    decoder: Decoder

    def file(self, number: int, data: bytes, refusal: str | None = None) -> ImageFile:
        """The image with a number, from 0, of a request."""
        return ImageFile(f"image {number}", data, self.decoder, refusal)


async def read_body(stream: AsyncIterator[bytes], headers: Mapping[str, str], limits: Limits) -> bytes:
    """The body of a request. Raises RefusedError before more than `body_bytes` are in memory, or after `body_s`."""
    too_large = f"the request has more than {limits.body_bytes} bytes; send fewer or smaller images"
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise RefusedError(422, "the header Content-Length is no number")
    if len(length) > 18 or int(length) > limits.body_bytes:
        raise RefusedError(413, too_large)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in stream:
                body += chunk
                if len(body) > limits.body_bytes:
                    raise RefusedError(413, too_large)
    except TimeoutError:
        raise RefusedError(408, f"the request did not arrive within {limits.body_s:g} s") from None
    return bytes(body)


async def parse_body(
    body: bytes, content_type: str, source: Source, json_form: type[Options], options: type[Options]
) -> tuple[Options, list[ImageFile]]:
    """The options and the image files of a request. Raises RefusedError.

    json_form: the form of a JSON body, which has `images` and `uris`; options: that of the fields of a multipart body.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return await asyncio.to_thread(_parse_json, body, source, json_form)
    if kind == "multipart/form-data":
        # in a thread with a loop of its own: the parser takes seconds for a hostile body, and does not wait meanwhile
        return await asyncio.to_thread(asyncio.run, _parse_multipart(body, content_type, source, options))
    raise RefusedError(
        415, f"Content-Type is {shown(content_type or 'missing')}; send multipart/form-data or application/json"
    )


def _parse_json(body: bytes, source: Source, form: type[Options]) -> tuple[Options, list[ImageFile]]:
    """`parse_body` for JSON."""
    try:
        if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
            raise RefusedError(413, f"the body has more than {MAX_JSON_VALUES} values; send fewer")
        parsed = _validated(form, parse_json(body, "the body"))
    except (UserError, RecursionError) as error:
        raise RefusedError(422, one_line(error)) from None
    encoded: list[str] = getattr(parsed, "images")  # noqa: B009 (both forms have it)
    uris: list[str] = getattr(parsed, "uris")  # noqa: B009
    _check_count(len(encoded) + len(uris), source.limits)
    images = [source.file(number, _decoded(number, text, source.limits)) for number, text in enumerate(encoded)]
    if uris and not source.uri_roots.roots:
        raise RefusedError(422, "uris are not enabled on this server; send the bytes of the images")
    for number, uri in enumerate(uris):
        refusal = f"uris.{number} is not a readable image of this server"  # the same for every reason
        try:
            data = source.uri_roots.read(uri)
        except BadImage:
            raise RefusedError(422, refusal) from None
        if len(data) > source.limits.image_bytes:
            raise RefusedError(422, refusal)
        images.append(source.file(len(images), data, refusal))
    return parsed, images


async def _parse_multipart(
    body: bytes, content_type: str, source: Source, form: type[Options]
) -> tuple[Options, list[ImageFile]]:
    """`parse_body` for multipart/form-data, whose files are the images, whatever their fields' names."""
    limits = source.limits

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = MultiPartParser(
        Headers({"content-type": content_type}),
        stream(),
        max_files=limits.images + 1,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    fields: dict[str, str] = {}
    files: list[UploadFile] = []
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise RefusedError(413, f"the request has more than {limits.images} images; send fewer") from None
        raise RefusedError(422, f"the multipart body cannot be read: {one_line(Exception(error.message))}") from None
    except (KeyError, ValueError, LookupError, UnicodeError) as error:  # no boundary, an unknown charset, hostile bytes
        raise RefusedError(422, f"the multipart body cannot be read: {one_line(error)}") from None
    try:
        for name, value in parsed.multi_items():
            if isinstance(value, UploadFile):
                files.append(value)
            elif name in fields:
                raise RefusedError(422, f"the field {quoted(name)} occurs more than once")
            else:
                fields[name] = value
        _check_count(len(files), limits)
        images = [
            source.file(number, _sized(f"file {number}", await file.read(), limits))
            for number, file in enumerate(files)
        ]
    finally:
        await parsed.close()
    return _validated(form, fields), images


def _check_count(count: int, limits: Limits) -> None:
    if count < 1:
        raise RefusedError(422, "the request has no image; send one or more")
    if count > limits.images:
        raise RefusedError(413, f"the request has {count} images, more than {limits.images}; send fewer")


def _decoded(number: int, text: str, limits: Limits) -> bytes:
    """The bytes of base64 text."""
    if len(text) > 4 * limits.image_bytes / 3 + 4:
        raise RefusedError(413, f"images.{number} has more than {limits.image_bytes} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise RefusedError(422, f"images.{number} is no base64") from None
    return _sized(f"images.{number}", data, limits)


def _sized(name: str, data: bytes, limits: Limits) -> bytes:
    """The bytes of an image, unless they are too many."""
    if len(data) > limits.image_bytes:
        raise RefusedError(413, f"{name} has {len(data)} bytes, more than {limits.image_bytes}")
    return data


def _validated(form: type[Options], values: object) -> Options:
    """The values as a form. Raises RefusedError naming the first that does not fit."""
    try:
        return form.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        sentences = {
            "extra_forbidden": f"there is no such field; the fields are {', '.join(form.model_fields)}",
            "model_type": "expected a JSON object",
        }
        raise RefusedError(422, f"{shown(place)}: {sentences.get(first['type'], shown(first['msg']))}") from None
