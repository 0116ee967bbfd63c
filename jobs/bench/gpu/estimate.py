"""The hours of the paper's recipe on a GPU, estimated from operations, bytes and launches that a CPU can count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from jobs.bench.gpu.device import GpuFacts
from jobs.bench.gpu.parts import Plan
from jobs.bench.gpu.training_step import Case, training_step

EFFICIENCY = 0.4  # assumed share of a GPU's peak for the large products of these models
LAUNCH_S = 8e-6  # assumed seconds that the processor needs for each operation that it queues
NUM_IMAGES = 2  # for which operations are counted; they grow with the number of images, and launches do not
ROW = "{:<15}{:>8}{:>9}{:>7}{:>10}{:>13}{:>9}{:>10}{:>8}"
PASSES = 8  # over weights and moments in an update: gradient, clipping, two moments and weights, read and written


class _Launches(TorchDispatchMode):
    """Counts the operations in its `with` block that compute, and not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


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
    """The cost of a training step. A step of `NUM_IMAGES` images is counted, and scaled to the number of the case."""
    small = replace(case, images=NUM_IMAGES)
    step = training_step(small, torch.device("cpu"), plan.scale)
    step()  # the optimizer allocates its moments
    counter, launches = FlopCounterMode(display=False), _Launches()
    with counter:
        step()
    with launches:
        step()
    scale = case.images / NUM_IMAGES
    weights = 4 * _parameters(step)
    return Cost(counter.get_total_flops() * scale, PASSES * weights, launches.count)


def _parameters(step: Callable[[], None]) -> int:
    """The number of trainable numbers that a training step updates."""
    optimizers = (cell.cell_contents for cell in step.__closure__ or ())
    (optimizer,) = (each for each in optimizers if isinstance(each, torch.optim.Optimizer))
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def estimate_lines(name: str, facts: GpuFacts, plan: Plan) -> list[str]:
    """The estimate with its arithmetic, one line per stage."""
    lines = [
        f"{name}: {facts.bfloat16:g} TFLOP/s in bfloat16 of which {100 * EFFICIENCY:.0f} % are assumed, "
        f"{facts.bandwidth:g} TB/s, {1e6 * LAUNCH_S:g} us per launch",
        ROW.format("stage", "steps", "TFLOP", "GB", "launches", "s: products", "memory", "launches", "hours"),
    ]
    total = 0.0
    for stage in plan.stages:
        case = replace(stage, images=min(stage.images, plan.max_images), checkpointing=False)
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
