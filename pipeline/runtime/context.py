"""What the loop knows of the world around it: rank, world size, device, and how to report.

The loop never imports Ray. `LocalContext` is one process (tests, a machine without Ray, trial steps); `RayContext`
wraps a Ray Train worker.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipeline.runtime.log import set_rank


class Context(Protocol):
    world_rank: int
    world_size: int
    device: torch.device

    def report(self, metrics: dict[str, Any]) -> None:
        """Tells the driver; a barrier: every rank calls it, equally often."""
        ...


def device_for(gpus: float) -> torch.device:
    """Where a process computes that was promised `gpus` GPUs: the configuration decides, not what happens to be there.

    Raises RuntimeError when GPUs were promised and none can be seen.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{gpus} GPUs were asked for and torch sees none; set gpus_per_worker to 0 or check the driver"
        )
    return torch.device("cuda")


class LocalContext:
    """One process, no cluster."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.world_rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.reports: list[dict[str, Any]] = []

    def report(self, metrics: dict[str, Any]) -> None:
        self.reports.append(metrics)


class RayContext:
    """A worker of Ray Train; its process group is there already."""

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
    """Every rank's value, on every rank, in the order of ranks. A collective: all ranks call it."""
    if context.world_size == 1:
        return [value]
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(context: Context, values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over the ranks, in place. A collective."""
    if context.world_size > 1:
        dist.all_reduce(values)
    return values
