"""The optimizers, and learning-rate schedules over optimizer steps, which are counted from 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from pipeline.config.sections import OptimizerSection, ScheduleSection


def learning_rate(schedule: ScheduleSection, base: float, step: int, *, steps_per_epoch: int) -> float:
    """The learning rate of optimizer step `step`.

    hyperbolic: base / max(warmup - step, 1) during the warm-up, then base x decay^(complete periods of
    `decay_every_epochs`), but at least min_lr, as in ExpansionNet v2's code.
    linear: a linear warm-up, then the decay of hyperbolic.
    inverse_sqrt: base x min(s^-1/2, s warmup^-3/2) x sqrt(warmup) with s = step + 1, as in the Meshed-Memory
    Transformer. base is the highest rate.
    """
    warmup = schedule.warmup_iterations
    if schedule.name == "inverse_sqrt":
        count = step + 1
        return base * math.sqrt(warmup) * min(count**-0.5, count * warmup**-1.5)
    if step < warmup and schedule.name != "hyperbolic":
        return base * (step + 1) / warmup
    if step < warmup - 1:
        return base / (warmup - step)
    periods = step // (steps_per_epoch * schedule.decay_every_epochs)
    return max(base * schedule.decay**periods, schedule.min_lr)


def make_optimizer(module: nn.Module, section: OptimizerSection, lr: float) -> torch.optim.Optimizer:
    """RAdam, Adam or AdamW over the trainable parameters.

    In the first five steps torch's RAdam updates by momentum, while that of ExpansionNet v2's code leaves the weights
    unchanged. From step 6 on both are the same.
    """
    optimizers = {"radam": torch.optim.RAdam, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_fused = section.name != "radam" and parameters[0].is_cuda  # one kernel for the update; RAdam has none
    return optimizers[section.name](
        parameters,
        lr=lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        # By default torch updates tensor by tensor on the CPU: a fifth of a small model's step.
        **({"fused": True} if is_fused else {"foreach": True}),
    )
