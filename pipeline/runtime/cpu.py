"""The processor that torch computes on: its threads and how memory is kept between steps."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names for them, glibc's malloc.h


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
        mallopt(_ARENA_MAX, 1)  # later threads share the one arena that can keep large tensors


def computing_thread(threads: int | None = None) -> ThreadPoolExecutor:
    """One thread for all of a process's computing, drawing and loading weights included.

    For processes whose own calls come from changing threads, as in Ray's actors. Each thread that computes gets a team
    of OpenMP threads that stays; with more of them in a process than it has cores, they no longer wait at work but
    sleep between any two operations, which took a third of a Swin's time. A thread that was there before
    `prepare_processor` also keeps an arena of its own, which gives large tensors back to the system at once.
    """
    prepare_processor(threads)
    return ThreadPoolExecutor(1, initializer=prepare_processor, initargs=(threads,))


def memory_mb(device: torch.device) -> float:
    """MiB: the process's resident set on a CPU, the most that tensors took on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20
