"""The precision of float32 products on a GPU, and the choice of the fastest precision by measuring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MIN_SPEEDUP = 1.15  # by which bfloat16 must be faster: a smaller difference may be noise
MIN_ROUNDS, MAX_ROUNDS = 5, 20  # of a measurement, after one that warms up
MEASUREMENT_S = 0.2  # after which a measurement takes no further round


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """In a `with` block, products of float32 numbers on a GPU use all their bits, or with "tf32" TensorFloat-32.

    TensorFloat-32 rounds factors to 10 bits after the point (GPUs since Ampere). Without this block, torch uses it for
    convolutions and not for matrices. On other processors nothing changes.
    """
    cudnn: Any = torch.backends.cudnn
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


@dataclass(frozen=True)
class PrecisionTimes:
    """The seconds per image of one computation in both precisions, on a device with this name."""

    device: str
    float32: float
    bfloat16: float

    @property
    def fastest(self) -> str:
        """The precision to use: bfloat16 only if it is clearly faster."""
        return "bfloat16" if self.float32 > MIN_SPEEDUP * self.bfloat16 else "float32"

    def __str__(self) -> str:
        milliseconds = f"{1000 * self.float32:.1f} ms in float32 and {1000 * self.bfloat16:.1f} ms in bfloat16"
        return f"an image takes {milliseconds} ({self.device})"


def measure_precisions(compute: Callable[[], object], device: torch.device, num_images: int = 1) -> PrecisionTimes:
    """Times `compute` in float32 and under autocast to bfloat16, in turn, in this process.

    It takes twelve computations, and for short ones up to 42, so that noise does not decide. num_images: the images of
    one computation.

    A processor that supports bfloat16 may still be slower with it, so that only a measurement shows what is faster.
    """

    def seconds(is_bfloat16: bool) -> float:
        begin = time.perf_counter()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
            compute()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    times: list[tuple[float, float]] = []
    for number in range(1 + MAX_ROUNDS):
        each = seconds(is_bfloat16=False), seconds(is_bfloat16=True)
        times += [each] if number else []
        if len(times) >= MIN_ROUNDS and sum(map(sum, times)) >= MEASUREMENT_S:
            break
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    float32, bfloat16 = (min(column) / num_images for column in zip(*times, strict=True))
    return PrecisionTimes(name, float32, bfloat16)
