"""Learning-rate schedules over iterations (optimizer steps, from 0), and the optimizers."""

from __future__ import annotations

import math

import torch
from torch import nn

from pipeline.config.sections import OptimizerSection, ScheduleSection


def learning_rate(schedule: ScheduleSection, base: float, step: int, *, steps_per_epoch: int) -> float:
    """The learning rate of optimizer step `step`.

    hyperbolic: base / max(warmup - step, 1) during the warm-up, then base x decay^(complete periods of
    `decay_every_epochs`), at least min_lr, as in ExpansionNet v2's reference.
    linear: a linear warm-up, then the same decay.
    inverse_sqrt: base x min(s^-1/2, s warmup^-3/2) x sqrt(warmup) with s = step + 1, as in the meshed-memory
    transformer; base is the peak.
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

    In its first five steps torch's RAdam updates by momentum where ExpansionNet v2's reference leaves the weights
    unchanged; from step 6 on both are the same.
    """
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "radam": torch.optim.RAdam,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options = {"lr": lr, "betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}
    options["foreach"] = True  # also on the CPU, where per-tensor updates took a fifth of a small model's step
    return kinds[section.name](parameters, **options)  # type: ignore[arg-type]
