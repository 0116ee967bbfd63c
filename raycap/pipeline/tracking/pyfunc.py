"""The pyfunc model that MLflow loads and serves: it captions the images in the rows of a table.

MLflow stores the package raycap with the model and imports this module from there. The module imports neither Ray nor
MLflow, so that a served model needs few packages.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raycap.models.config import Values
from raycap.pipeline.data.images import BadImage
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import BATCH_SIZE, CaptionService
from raycap.pipeline.evaluation.results import ImageCaption
from raycap.pipeline.runtime.names import quoted

MAX_IMAGE_BYTES = 32 * 2**20  # of an image file, because a hostile file may take a decoder a microsecond per byte
MAX_ROWS = 10_000  # in one call of `predict`, as many as Spark sends at a time


class PyfuncModel:
    """A captioning model with the method `predict` of MLflow's pyfunc interface."""

    def __init__(self, service: CaptionService) -> None:
        self.service = service

    def predict(self, model_input: Any, params: Values | None = None) -> list[Values]:
        """Returns for each row the caption, `log_prob` (nats), and, if the model has them, its confidence values.

        The confidence values are `confidence` and `expected_ciderd`. model_input: a table whose column `image` contains
        the bytes of image files, or base64 of them.

        Raises ValueError if the table has no such column or more than MAX_ROWS rows, or if an image is invalid. The
        message names the row of the image.
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
        """The pixels (3, H, W) of a row's image. If the image is invalid, raises a ValueError that names the row."""
        try:
            return self.service.pixels(_file_bytes(image))
        except BadImage as error:
            reason = str(error)
        raise ValueError(f"row {row}: {reason}")  # not in `except`, because MLflow sends causes to clients


def _file_bytes(image: Any) -> bytes:
    """The image file in a value of column image. Raises BadImage if the type is wrong or the file is too large."""
    if not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise BadImage(f"image is a {type(image).__name__}; expected file bytes, in JSON as base64")
    if isinstance(image, str) and len(image) <= 2 * MAX_IMAGE_BYTES:
        # Base64 may be in a data URL, in lines, without padding, and have the alphabet for URLs.
        code = "".join(re.sub(r"\A\s*data:[^,]*;base64,", "", image).split()).rstrip("=")
        try:
            image = base64.b64decode(code.replace("-", "+").replace("_", "/") + -len(code) % 4 * "=", validate=True)
        except ValueError as error:
            raise BadImage(f"image is the text {quoted(image)}, which is no base64 of a file") from error
    if len(image) > MAX_IMAGE_BYTES:
        raise BadImage(f"image is larger than {MAX_IMAGE_BYTES} bytes")
    return bytes(image)


def _load_pyfunc(path: str, model_config: Values | None = None) -> PyfuncModel:
    """Loads the model from its bundle. MLflow calls this function and prescribes its name and arguments."""
    return PyfuncModel(CaptionService(load_bundle(Path(path)), **(model_config or {})))
