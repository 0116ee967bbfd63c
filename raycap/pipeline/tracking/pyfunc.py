"""The pyfunc model that MLflow loads and serves: a `CaptionService` that reads tables of images.

This module imports neither Ray nor MLflow, so that a served model needs few packages. The package raycap is stored with
the model.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raycap.models.config import Values
from raycap.pipeline.data.image_sources import NOT_READABLE, UriRoots
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import BATCH_SIZE, CaptionService
from raycap.pipeline.evaluation.results import ImageCaption

MAX_IMAGE_BYTES = 32 * 2**20  # in column `image`; a decoder may take a microsecond for each byte of a hostile file
MAX_ROWS = 10_000  # of one call of `predict`; Spark sends this many at a time


class PyfuncModel:
    """The model of MLflow's pyfunc interface. uri_roots: as for `UriRoots`, for the column `uri`."""

    def __init__(self, service: CaptionService, uri_roots: Any = ()) -> None:
        self.service, self.uri_roots = service, UriRoots(uri_roots)

    def predict(self, model_input: Any, params: Values | None = None) -> list[Values]:
        """The caption of each row with `log_prob` (nats), and `confidence` and `expected_ciderd` if the model has them.

        Column `image` holds the bytes of image files or base64 of them. Column `uri` holds paths and s3:// URIs below
        `uri_roots`, which are read for rows without `image`. Raises ValueError naming a row with neither, with another
        type, or with an invalid image.
        """
        captions: list[ImageCaption] = []
        batch: list[Tensor] = []
        rows = _rows(model_input)
        for number, (image, uri) in enumerate(rows):
            batch.append(self._row_pixels(number, image, uri))
            if len(batch) == BATCH_SIZE or number == len(rows) - 1:
                captions += self.service.caption(torch.stack(batch))
                batch.clear()
        return [each.to_json() for each in captions]

    def _row_pixels(self, number: int, image: Any, uri: Any) -> Tensor:
        """The pixels of a row from file bytes, base64 or a URI. ValueError naming the row when that fails."""
        try:
            return self._read_uri(uri) if image is None else self.service.pixels(_file_bytes(image))
        except BadImage as error:
            reason = str(error)
        raise ValueError(f"row {number}: {reason}")  # without the cause, because MLflow's answers contain all of it

    def _read_uri(self, uri: Any) -> Tensor:
        """The pixels of the image at a URI. Raises BadImage."""
        if uri is None:
            raise BadImage("neither image (file bytes, in JSON as base64) nor uri (a path or s3://)")
        if not isinstance(uri, str):
            raise BadImage(f"uri is a {type(uri).__name__}; expected text")
        if not self.uri_roots.roots:
            raise BadImage(
                "column uri is not enabled on this server; send the file's bytes in column image, or load the model "
                "with uri_roots in its model_config"
            )
        data = self.uri_roots.read(uri)
        try:
            return self.service.pixels(data)
        except BadImage as error:
            raise BadImage(NOT_READABLE) from error


def _rows(table: Any) -> list[tuple[Any, Any]]:
    """Each row's values in the columns image and uri of a table; None for a missing value."""
    columns = {name: list(table[name]) for name in ("image", "uri") if name in table}
    if not columns:
        raise ValueError("the input needs a column image (file bytes, in JSON as base64) or uri (a path or s3://)")
    num_rows = max(map(len, columns.values()))
    if num_rows > MAX_ROWS:
        raise ValueError(f"the input has {num_rows} rows; send at most {MAX_ROWS} at a time")
    images, uris = (map(_value, columns.get(name, [None] * num_rows)) for name in ("image", "uri"))
    return list(zip(images, uris, strict=True))


def _value(value: Any) -> Any:
    """None for a value that is empty or missing, for which pandas has NaN."""
    is_missing = isinstance(value, float) and math.isnan(value)
    return None if is_missing or (isinstance(value, (str, bytes, bytearray)) and not value) else value


def _file_bytes(image: Any) -> bytes:
    """The bytes of a value of column image. Raises BadImage for other types, and for too many bytes."""
    if not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise BadImage(f"image is a {type(image).__name__}; expected file bytes, in JSON as base64")
    if len(image) > (4 * MAX_IMAGE_BYTES / 3 + 4 if isinstance(image, str) else MAX_IMAGE_BYTES):
        raise BadImage(f"image is larger than {MAX_IMAGE_BYTES} bytes")
    if not isinstance(image, str):
        return bytes(image)
    try:
        return base64.b64decode(image, validate=True)
    except ValueError as error:
        raise BadImage("image is text but no base64; a path belongs to column uri") from error


def _load_pyfunc(path: str, model_config: Values | None = None) -> PyfuncModel:
    """The function by which MLflow loads the model; MLflow fixes its name and arguments."""
    settings = dict(model_config or {})
    uri_roots = settings.pop("uri_roots", ())
    return PyfuncModel(CaptionService(load_bundle(Path(path)), **settings), uri_roots)
