"""Whether the features of training images are stored, or computed again at each step: what costs less time."""

from __future__ import annotations

import math

# What a worker reaches, roughly: the decision is about factors, not percents.
S3_RATE = 1e8  # bytes per second from S3
DISK_RATE = 2e8  # bytes per second of random rows from a local disk
GPU_RATE = 5e13  # operations per second of a backbone on a GPU in bfloat16, a sixth of an A100's peak
CPU_RATE = 5e10  # operations per second of a backbone and thread of a CPU


def reading_seconds(total_bytes: int, image_bytes: int, room_bytes: int, rate: float) -> float:
    """Seconds to read the features of an image in the mean: uncached share x image_bytes / rate.

    The uncached share is what does not fit into `room_bytes`, 1 - room_bytes / total_bytes, or 0 where all fits. The
    rest takes no time. total_bytes: of all training images. rate: bytes per second.
    """
    return max(0.0, 1 - room_bytes / max(1, total_bytes)) * image_bytes / rate


def computing_seconds(macs: int, gpus: float, threads: int, images: int = 1, batch_size: int = 1) -> float:
    """Seconds to compute the features of an image: 2 x macs x filling operations / the device's rate.

    The filling is the number of images that are computed for one that is needed: ceil(images / batch_size) x batch_size
    / images. macs: multiply-accumulates of the backbone. gpus, threads: of a worker, which computes on its threads
    without GPUs. images: of a worker's micro-batch. batch_size: `features.batch_size`.
    """
    filling = math.ceil(images / batch_size) * batch_size / images
    return 2 * macs * filling / (GPU_RATE * min(1.0, gpus) if gpus else CPU_RATE * threads)


def stores_features(
    total_bytes: int, room_bytes: int, most_bytes: int | None, reading_s: float, computing_s: float
) -> bool:
    """Whether the features of training images are stored.

    They are if their `total_bytes` fit into `room_bytes`, and never if they exceed `most_bytes` (None: no limit).
    Between the two they are stored if reading an image's features takes at most as many seconds as computing them.
    """
    if total_bytes <= room_bytes:
        return True
    return (most_bytes is None or total_bytes <= most_bytes) and reading_s <= computing_s
