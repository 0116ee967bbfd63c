"""Settings for the computations of a process: device, number of threads, allocation of memory, and precision.

torch is imported only in functions, because its import takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h, the parameters that mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
MIN_SPEEDUP = 1.15  # the factor by which bfloat16 must be faster, because a smaller difference may be noise
ROUNDS = 8  # timed runs in each precision, after one run that warms up
SLOW = 4  # if bfloat16 takes this many times as long in the first run, further runs would not make it faster


def computes_on_cpus() -> bool:
    """True if the environment variable RAYCAP_DEVICE=cpu makes processes compute on CPUs, even with assigned GPUs.

    With this variable, placement on GPUs can be tested on nodes that have no GPU (`ray start --num-gpus=4`).
    """
    return os.environ.get("RAYCAP_DEVICE") == "cpu"


def device_for(gpus: float) -> torch.device:
    """The device of a process to which `gpus` GPUs are assigned. Raises RuntimeError if torch sees none of them."""
    import torch

    if not gpus or computes_on_cpus():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the configuration assigns {gpus} GPUs, but torch sees none; set gpus_per_worker to 0 or check the driver"
        )
    return torch.device("cuda")


def prepare_processor(threads: int | None = None) -> None:
    """Sets the number of torch's threads, and makes the process keep freed memory for its next tensors.

    threads: if it is None, torch's default remains.

    Every step allocates large tensors of the same sizes again. By default glibc returns each large freed tensor to the
    system, which then has to zero new pages. Zeroing took a fifth of a beam search and a tenth of a training step. As a
    cost, a process keeps its peak memory until it ends. Without glibc, the memory settings have no effect.

    Only the main arena keeps tensors above 64 MiB, and a new thread may get any arena that exists. A process that has
    threads before this call, such as Ray's, therefore needs MALLOC_ARENA_MAX=1 in its environment.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)  # bytes. Smaller tensors come from the heap, which keeps freed memory.
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)  # bytes of free memory that are kept at the end of the heap
        mallopt(_ARENA_MAX, 1)  # one arena for all threads


def computing_thread(threads: int) -> ThreadPoolExecutor:
    """An executor with one thread, in which a process must do all its computing, including loading of weights.

    Ray calls an actor from changing threads, and each thread that computes gets a permanent team of OpenMP threads. If
    a process has more OpenMP threads than cores, they sleep between operations instead of spinning, which took a third
    of the time of a Swin backbone.
    """
    prepare_processor(threads)
    return ThreadPoolExecutor(1, initializer=prepare_processor, initargs=(threads,))


def memory_mb(device: torch.device) -> float:
    """Memory in MiB: for a CPU the resident set of the process, for a GPU the peak of its allocated tensors."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20


def num_cores() -> int:
    """The number of CPU cores of this process's machine or container (cgroup version 2), whichever is less."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # there is no limit, as in `free_memory_mb`
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def free_memory_mb() -> float:
    """The free memory in MB of the machine or of the container (cgroup version 2), whichever is less."""
    import psutil

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    # Errors mean that there is no limit: the file is missing without cgroup version 2, and "max" is not a number.
    with suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(statistics["inactive_file"]))  # cached files, which can be freed
    return max(free, 0) / 2**20


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within the context, sets how precisely a GPU multiplies float32 numbers in matrices and convolutions.

    precision: with "tf32", GPUs since Ampere round factors to 10 bits after the point (TensorFloat-32). With any other
    value, factors keep all bits. torch's own default is TensorFloat-32 for convolutions only. On CPUs nothing changes.
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
    """Seconds per image that one computation takes in float32 and in bfloat16. device: the name of the GPU, or CPU."""

    device: str
    float32: float
    bfloat16: float

    @property
    def fastest(self) -> str:
        """The precision to use: bfloat16 if it is faster by the factor MIN_SPEEDUP, otherwise float32."""
        return "bfloat16" if self.float32 > MIN_SPEEDUP * self.bfloat16 else "float32"

    def __str__(self) -> str:
        milliseconds = f"{1000 * self.float32:.1f} ms in float32 and {1000 * self.bfloat16:.1f} ms in bfloat16"
        return f"an image takes {milliseconds} ({self.device})"


def measure_precisions(compute: Callable[[], object], device: torch.device, num_images: int = 1) -> PrecisionTimes:
    """Times `compute` in float32 and under autocast to bfloat16, in turn. The fastest run in each precision counts.

    Only a measurement shows which is faster, because a processor that supports bfloat16 may still be slower with it.
    Where its instructions are missing, the first run takes seconds and is the only one. num_images: the number of
    images in one call of `compute`.
    """
    import torch

    def seconds(is_bfloat16: bool) -> float:
        begin = time.perf_counter()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
            compute()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    def both() -> tuple[float, float]:
        return seconds(is_bfloat16=False), seconds(is_bfloat16=True)

    rounds = [both()]  # warms up
    if rounds[0][1] < SLOW * rounds[0][0]:
        rounds = [both() for _ in range(ROUNDS)]
    float32, bfloat16 = (min(times) / num_images for times in zip(*rounds, strict=True))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return PrecisionTimes(name, float32, bfloat16)


def slow_bfloat16(key: str) -> str:
    """A warning if this process's CPUs multiply matrices in bfloat16 slower than in float32, otherwise "".

    key: of the precision, which is bfloat16.
    """
    import torch

    factors = torch.ones(512, 512)  # without bfloat16 instructions, a product of this size takes 0.3 s
    _, times = (measure_precisions(lambda: factors @ factors, factors.device) for _ in range(2))  # the first warms up
    ratio = times.bfloat16 / times.float32
    if ratio < MIN_SPEEDUP:
        return ""
    return (
        f"{key} is bfloat16, in which this processor takes {ratio:.1f} times as long for a product; set it to float32"
    )
