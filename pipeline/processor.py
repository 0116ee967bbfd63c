"""The processor that torch computes on: its threads and how memory is kept between steps."""

from __future__ import annotations

import ctypes

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names for them, glibc's malloc.h


def prepare_processor(threads: int | None = None) -> None:
    """Sets torch's threads (None: torch's choice) and keeps freed memory in the process.

    Every step allocates the same large tensors again. glibc gives each one back to the system and the system hands out
    pages of zeros one by one, which was a fifth of a beam search and a tenth of a training step. The price: a process
    holds on to the most that it ever needed. Without glibc nothing happens.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def memory_mb(device: torch.device) -> float:
    """MiB: the process's resident set on a CPU, the most that tensors took on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20
