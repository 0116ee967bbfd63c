"""The training loop's environment: rank, world size, device, and how to report metrics.

The loop never imports Ray. `LocalContext` is a single process (tests, a machine without Ray, the dry run); `RayContext`
is a worker of Ray Train.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipeline.runtime.log import set_rank


class Context(Protocol):
    """The environment of one worker of the training loop."""

    world_rank: int
    world_size: int
    device: torch.device

    def report(self, metrics: dict[str, Any]) -> None:
        """Sends metrics to the driver. It is a barrier: every rank must call it equally often."""
        ...


def device_for(gpus: float) -> torch.device:
    """The device of a process to which the configuration assigns `gpus` GPUs, whatever GPUs the machine has.

    Raises RuntimeError when GPUs are assigned and torch finds none.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the configuration assigns {gpus} GPUs, but torch sees none; set gpus_per_worker to 0 or check the driver"
        )
    return torch.device("cuda")


class LocalContext:
    """A single process without a cluster."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.world_rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.reports: list[dict[str, Any]] = []

    def report(self, metrics: dict[str, Any]) -> None:
        self.reports.append(metrics)


class RayContext:
    """A worker of Ray Train. Ray has already set up the process group."""

    def __init__(self) -> None:
        import ray.train
        from ray.train.torch import get_device

        context = ray.train.get_context()
        self.world_rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = get_device()
        set_rank(self.world_rank)

    def report(self, metrics: dict[str, Any]) -> None:
        import ray.train

        ray.train.report(metrics)


def gather_objects(context: Context, value: Any) -> list[Any]:
    """Every rank's value in the order of ranks, on every rank. All ranks must call this together."""
    if context.world_size == 1:
        return [value]
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(context: Context, values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over the ranks, in place. All ranks must call this together."""
    if context.world_size > 1:
        dist.all_reduce(values)
    return values
