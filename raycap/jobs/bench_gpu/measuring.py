"""The time of a call, and images that are the same in every run."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


def timed(call: Callable[[], Result], device: torch.device | None = None) -> tuple[Result, float]:
    """The result of a call, and its seconds. On a GPU the time includes the work that the call has queued there."""
    begin = time.perf_counter()
    result = call()
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def noise_jpegs(count: int, rows: int, columns: int) -> Iterator[bytes]:
    """JPEG files of 640 x 480 pixels, each enlarged smoothly from `rows` x `columns` random colors."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (rows, columns, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()
