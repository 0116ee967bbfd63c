"""The hours of the paper's recipe on a GPU, estimated from operations, bytes and launches that a CPU can count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from raycap.jobs.bench_gpu.device import GpuFacts
from raycap.jobs.bench_gpu.parts import Plan
from raycap.jobs.bench_gpu.training_step import Case, training_step
from raycap.models import dropout

EFFICIENCY = 0.4  # assumed share of a GPU's peak for the large products of these models
LAUNCH_S = 8e-6  # assumed seconds that the processor needs for each operation that it queues
SIZES = (1, 3)  # images for which a step is counted; products and traffic grow linearly, and launches do not grow
ROW = "{:<15}{:>8}{:>9}{:>7}{:>10}{:>13}{:>9}{:>10}{:>8}"
PASSES = 7  # over the weights in an update: the gradient read, two moments and weights read and written


class Traffic(TorchDispatchMode):
    """Counts the operations in its `with` block that compute, and the bytes that they read and write.

    Views and allocations are left out, and an optimizer's steps, which are few launches on a GPU (`PASSES`). Each
    operation counts on its own: compiled code moves fewer bytes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.launches = self.bytes = 0
        self.in_optimizer = False
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "in_optimizer", True))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "in_optimizer", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        allocates = "empty" in func.overloadpacket.__name__
        if not func.is_view and not allocates and not self.in_optimizer:
            self.launches += 1
            tensors = (each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor))
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


@dataclass(frozen=True)
class Cost:
    """What a step of a stage asks of a GPU."""

    operations: float
    bytes: float
    launches: int

    def seconds(self, facts: GpuFacts) -> dict[str, float]:
        """The time that each takes alone. The largest one decides, because a GPU does all three at the same time."""
        return {
            "products": self.operations / (EFFICIENCY * facts.peak("bfloat16")),
            "memory": self.bytes / (facts.bandwidth * 1e12),
            "launches": self.launches * LAUNCH_S,
        }


def cost_of(case: Case, plan: Plan) -> Cost:
    """The cost of a training step. Steps of `SIZES` images are counted and extrapolated to the case's number."""
    few, some = (counted_step(replace(case, images=images), plan) for images in SIZES)
    step = (case.images - SIZES[0]) / (SIZES[1] - SIZES[0])
    operations, moved = (few[part] + step * (some[part] - few[part]) for part in range(2))
    return Cost(operations, moved, launches=some[2])


def counted_step(case: Case, plan: Plan) -> tuple[float, float, int]:
    """The operations, bytes and launches of one step of a case."""
    step = training_step(case, torch.device("cpu"), plan.scale)
    optimizer = _optimizer_of(step)
    counter, traffic = FlopCounterMode(display=False), Traffic(optimizer)
    with gpu_dropout(), traffic, counter:
        step()
    weights = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    return counter.get_total_flops(), traffic.bytes + 4 * PASSES * weights, traffic.launches


@contextmanager
def gpu_dropout() -> Iterator[None]:
    """In a `with` block, dropout is the single operation that it is on a GPU, and not the CPU's mask of bytes."""
    before = dropout.dropout
    dropout.dropout = lambda x, p: F.dropout(x, p)
    try:
        yield
    finally:
        dropout.dropout = before


def _optimizer_of(step: Callable[[], None]) -> torch.optim.Optimizer:
    """The optimizer that a training step calls."""
    contents = (cell.cell_contents for cell in step.__closure__ or ())
    (optimizer,) = (each for each in contents if isinstance(each, torch.optim.Optimizer))
    return optimizer


def estimate_lines(name: str, facts: GpuFacts, plan: Plan) -> list[str]:
    """The estimate with its arithmetic, one line per stage."""
    lines = [
        f"{name}: {facts.bfloat16:g} TFLOP/s in bfloat16 of which {100 * EFFICIENCY:.0f} % are assumed, "
        f"{facts.bandwidth:g} TB/s, {1e6 * LAUNCH_S:g} us per launch",
        ROW.format("stage", "steps", "TFLOP", "GB", "launches", "s: products", "memory", "launches", "hours"),
    ]
    total = 0.0
    for stage in plan.stages:
        images = min(stage.images, plan.max_images)
        case = replace(stage, images=images, precision="bfloat16", checkpointing=False)
        cost, steps = cost_of(case, plan), stage.samples / case.images
        seconds = cost.seconds(facts)
        hours = steps * max(seconds.values()) / 3600
        total += hours
        lines.append(
            ROW.format(
                stage.name,
                f"{steps:.0f}",
                f"{cost.operations / 1e12:.2f}",
                f"{cost.bytes / 1e9:.2f}",
                cost.launches,
                *(f"{value:.3f}" for value in seconds.values()),
                f"{hours:.2f}",
            )
        )
    return [*lines, f"the whole recipe without extraction and validation: {total:.2f} hours"]
