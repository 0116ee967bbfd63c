"""The pyfunc model that MLflow loads and serves: a `CaptionService` that reads tables of images.

This module imports neither Ray nor MLflow, so that a served model needs few packages. The package raycap is stored with
the model.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raycap.models.config import Values
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import BATCH_SIZE, CaptionService
from raycap.pipeline.evaluation.results import ImageCaption

MAX_IMAGE_BYTES = 32 * 2**20  # of an image file; a decoder may take a microsecond for each byte of a hostile file
MAX_ROWS = 10_000  # of one call of `predict`; Spark sends this many at a time


class PyfuncModel:
    """The model of MLflow's pyfunc interface."""

    def __init__(self, service: CaptionService) -> None:
        self.service = service

    def predict(self, model_input: Any, params: Values | None = None) -> list[Values]:
        """The caption of each row with `log_prob` (nats), and `confidence` and `expected_ciderd` if the model has them.

        Column `image` holds the bytes of image files, or base64 of them. Raises ValueError for a table without the
        column or with more than MAX_ROWS rows, and for an invalid image, whose row the message names.
        """
        if "image" not in model_input:
            raise ValueError("the input needs a column image: file bytes, in JSON as base64")
        images = list(model_input["image"])
        if len(images) > MAX_ROWS:
            raise ValueError(f"the input has {len(images)} rows; send at most {MAX_ROWS} at a time")
        captions: list[ImageCaption] = []
        for first in range(0, len(images), BATCH_SIZE):
            rows = range(first, min(first + BATCH_SIZE, len(images)))
            captions += self.service.caption(torch.stack([self._pixels(row, images[row]) for row in rows]))
        return [each.to_json() for each in captions]

    def _pixels(self, row: int, image: Any) -> Tensor:
        """The pixels of the image in a row. Raises ValueError that names the row."""
        try:
            return self.service.pixels(_file_bytes(image))
        except BadImage as error:
            reason = str(error)
        raise ValueError(f"row {row}: {reason}")  # without the cause, because MLflow's answers contain all of it


def _file_bytes(image: Any) -> bytes:
    """The bytes of a value of column image. Raises BadImage for other types, and for too many bytes."""
    if not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise BadImage(f"image is a {type(image).__name__}; expected file bytes, in JSON as base64")
    longest = MAX_IMAGE_BYTES
    if isinstance(image, str):  # base64 has four characters for three bytes
        longest = 4 * MAX_IMAGE_BYTES // 3 + 4
    if len(image) > longest:
        raise BadImage(f"image is larger than {MAX_IMAGE_BYTES} bytes")
    if not isinstance(image, str):
        return bytes(image)
    try:
        return base64.b64decode(image, validate=True)
    except ValueError as error:
        raise BadImage("image is text, but no base64 of a file") from error


def _load_pyfunc(path: str, model_config: Values | None = None) -> PyfuncModel:
    """The function by which MLflow loads the model; MLflow fixes its name and arguments."""
    return PyfuncModel(CaptionService(load_bundle(Path(path)), **(model_config or {})))
