"""Learning rates over iterations (optimizer steps, from 0)."""

from __future__ import annotations

import math

import torch
from torch import nn

from pipeline.config.sections import OptimizerSection, ScheduleSection


def learning_rate(schedule: ScheduleSection, base: float, step: int, *, steps_per_epoch: int) -> float:
    """The rate of optimizer step `step`.

    hyperbolic: base / max(warmup - step, 1) up to the warm-up's end, then base x decay^(whole periods of
    `decay_every_epochs`), not below min_lr: ExpansionNet v2's reference. linear: rises over the warm-up, then
    anneals in the same way. inverse_sqrt: base x min(s^-1/2, s warmup^-3/2) x sqrt(warmup) with s = step + 1, base
    being the peak: the meshed-memory transformer's.
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

    torch's RAdam makes momentum steps in its first five steps where ExpansionNet v2's reference makes none; from step
    6 on the rule is the same.
    """
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "radam": torch.optim.RAdam,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options = {"lr": lr, "betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}
    # many small tensors at once, also on the CPU: a fifth of a small model's step was the optimizer's Python
    options["foreach"] = True
    return kinds[section.name](parameters, **options)  # type: ignore[arg-type]
