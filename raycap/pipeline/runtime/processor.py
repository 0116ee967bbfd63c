"""How this process computes: on which device, with how many threads, how it keeps memory, and in which precision.

torch is imported only in functions, because its import takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Parameters of mallopt, from glibc's malloc.h, where their names begin with M_.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
MIN_SPEEDUP = 1.15  # by which bfloat16 must be faster: a smaller difference may be noise
ROUNDS = 8  # of a measurement, after one round that warms up


def computes_on_cpus() -> bool:
    """Whether processes compute on the CPU although GPUs are assigned to them.

    The environment variable RAYCAP_DEVICE=cpu asks for it, so that placement on GPUs can be tested on nodes that have
    none (`ray start --num-gpus=4`).
    """
    return os.environ.get("RAYCAP_DEVICE") == "cpu"


def device_for(gpus: float) -> torch.device:
    """The device of a process to which the configuration assigns `gpus` GPUs. Raises RuntimeError for a missing GPU."""
    import torch

    if not gpus or computes_on_cpus():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the configuration assigns {gpus} GPUs, but torch sees none; set gpus_per_worker to 0 or check the driver"
        )
    return torch.device("cuda")


def prepare_processor(threads: int | None = None) -> None:
    """Sets the number of torch's threads (None for torch's default), and lets the process keep freed memory.

    Every step allocates large tensors of the same sizes again. By default glibc returns each freed tensor to the
    system, which then has to zero new pages. That took a fifth of a beam search and a tenth of a training step. The
    price is that a process keeps its peak memory until it ends. Without glibc the memory settings have no effect.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)  # bytes: smaller tensors come from the heap, which keeps freed memory
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # bytes: up to this much free memory is kept at the end of the heap
        mallopt(_ARENA_MAX, 1)  # one arena for all threads, because only the main arena keeps large tensors


def computing_thread(threads: int) -> ThreadPoolExecutor:
    """An executor with one thread for all computing of a process, including weight initialization and loading.

    Ray calls an actor from changing threads, and each thread that computes gets a permanent team of OpenMP threads. If
    a process has more of these than cores, they sleep between operations instead of spinning, which took a third of the
    time of a Swin backbone. Also, a thread that existed before `prepare_processor` has a malloc arena of its own, which
    returns large tensors to the system at once.
    """
    prepare_processor(threads)
    return ThreadPoolExecutor(1, initializer=prepare_processor, initargs=(threads,))


def memory_mb(device: torch.device) -> float:
    """MiB of memory: on a CPU the resident set of the process, on a GPU the peak of its allocated tensors."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within the context, products of float32 numbers on a GPU use all their bits, or with "tf32" TensorFloat-32.

    TensorFloat-32 rounds factors to 10 bits after the point (GPUs since Ampere). By default torch uses it for
    convolutions but not for matrices. On other processors nothing changes.
    """
    import torch

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
    """The seconds per image that one computation takes in both precisions. device: its name."""

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
    """Times `compute` in float32 and under autocast to bfloat16, in turn. The fastest run of each counts.

    Only a measurement shows what is faster, because a processor that supports bfloat16 may still be slower with it.
    num_images: the number of images in one computation.
    """
    import torch

    def seconds(is_bfloat16: bool) -> float:
        begin = time.perf_counter()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
            compute()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    times = [(seconds(is_bfloat16=False), seconds(is_bfloat16=True)) for _ in range(1 + ROUNDS)][1:]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    float32, bfloat16 = (min(column) / num_images for column in zip(*times, strict=True))
    return PrecisionTimes(name, float32, bfloat16)
