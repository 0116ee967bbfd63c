"""The pyfunc model that MLflow loads and serves: it captions the images in the rows of a table.

MLflow stores the package raycap with the model and imports this module from there. The module imports neither Ray nor
MLflow, so that a served model needs few packages.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from raycap.models.config import Values
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
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
        files = [_file_bytes(row, image) for row, image in enumerate(images)]
        captions = list(self.service.caption_images(files))
        for row, each in enumerate(captions):
            if each.error is not None:
                raise ValueError(f"row {row}: {each.error}")
        return [each.to_json() for each in captions]


def _file_bytes(row: int, image: Any) -> bytes:
    """The image file in a value of column image. Raises ValueError if the type is wrong or the file is too large."""
    if not isinstance(image, (str, bytes, bytearray, memoryview)):
        raise ValueError(f"row {row}: image is a {type(image).__name__}; expected file bytes, in JSON as base64")
    if isinstance(image, str) and len(image) <= 2 * MAX_IMAGE_BYTES:
        # Base64 may be in a data URL, in lines, without padding, and have the alphabet for URLs.
        code = "".join(re.sub(r"\A\s*data:[^,]*;base64,", "", image).split()).rstrip("=")
        try:
            image = base64.b64decode(code.replace("-", "+").replace("_", "/") + -len(code) % 4 * "=", validate=True)
        except ValueError:  # not a cause of the next error, because MLflow sends causes to clients
            raise ValueError(f"row {row}: image is the text {quoted(image)}, which is no base64 of a file") from None
    if len(image) > MAX_IMAGE_BYTES:
        raise ValueError(f"row {row}: image is larger than {MAX_IMAGE_BYTES} bytes")
    return bytes(image)


def _load_pyfunc(path: str, model_config: Values | None = None) -> PyfuncModel:
    """Loads the model from its bundle. MLflow calls this function and prescribes its name and arguments."""
    return PyfuncModel(CaptionService(load_bundle(Path(path)), **(model_config or {})))
