"""Settings for computing with torch on a CPU: its threads, and the reuse of freed memory between steps."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

# Parameters of mallopt, from glibc's malloc.h, where their names begin with M_.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def prepare_processor(threads: int | None = None) -> None:
    """Sets the number of torch's threads (None: torch's default) and keeps freed memory in the process.

    Every step allocates the same large tensors again. By default glibc returns each tensor to the system, which then
    zeroes new pages. That took a fifth of a beam search and a tenth of a training step. In return, a process keeps its
    peak memory until it ends. Without glibc the memory settings have no effect.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)  # bytes: smaller tensors come from the heap, which keeps freed memory
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # bytes: up to this much free memory is kept at the end of the heap
        mallopt(_ARENA_MAX, 1)  # one arena for all threads, because only the main arena keeps large tensors


def computing_thread(threads: int) -> ThreadPoolExecutor:
    """An executor with one thread for all computing of a process, including weight initialization and loading.

    Ray calls an actor from changing threads, and each computing thread gets a permanent team of OpenMP threads. If a
    process has more of these than cores, they sleep between operations instead of spinning, which took a third of the
    time of a Swin backbone. Also, a thread older than `prepare_processor` has another malloc arena, which returns large
    tensors to the system at once.
    """
    prepare_processor(threads)
    return ThreadPoolExecutor(1, initializer=prepare_processor, initargs=(threads,))


def memory_mb(device: torch.device) -> float:
    """MiB of memory: the resident set of the process on a CPU, the peak of allocated tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20
