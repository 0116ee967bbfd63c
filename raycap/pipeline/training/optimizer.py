"""The optimizers, the learning rate of each step, and the average of weights. Steps are counted from 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raycap.models.captioner import Captioner
from raycap.models.config import Values
from raycap.pipeline.config.sections import OptimizerSection, ScheduleSection

WARM_UP_STEPS = 10  # see `WeightAverage`


def learning_rate(
    schedule: ScheduleSection, base: float, step: int, *, steps_per_epoch: int, total_steps: int
) -> float:
    """The learning rate of the optimizer step `step` in a stage of `total_steps`.

    hyperbolic: base / max(warmup - step, 1) during the warm-up, as in ExpansionNet v2's code. Then
    base x decay^(complete periods of `decay_every_epochs`), but at least min_lr.
    linear: a linear warm-up, then the decay of hyperbolic.
    inverse_sqrt: base x min(s^-1/2, s warmup^-3/2) x sqrt(warmup) with s = step + 1, as in the Meshed-Memory
    Transformer. base is the highest rate.
    cosine: a linear warm-up, then half a period of the cosine, which falls from base to min_lr in the last step
    (Loshchilov and Hutter 2017, SGDR, equation 5, without restarts).
    """
    warmup = schedule.warmup_iterations
    if schedule.name == "inverse_sqrt":
        count = step + 1
        return base * math.sqrt(warmup) * min(count**-0.5, count * warmup**-1.5)
    if step < warmup and schedule.name != "hyperbolic":
        return base * (step + 1) / warmup
    if schedule.name == "cosine":
        progress = (step + 1 - warmup) / (total_steps - warmup)
        return schedule.min_lr + 0.5 * (base - schedule.min_lr) * (1 + math.cos(math.pi * progress))
    if step < warmup - 1:
        return base / (warmup - step)
    periods = step // (steps_per_epoch * schedule.decay_every_epochs)
    return max(base * schedule.decay**periods, schedule.min_lr)


def make_optimizer(captioner: Captioner, section: OptimizerSection, lr: float) -> torch.optim.Optimizer:
    """RAdam, Adam or AdamW over the trainable parameters.

    In the first five steps, torch's RAdam updates by momentum, but the RAdam of ExpansionNet v2's code leaves the
    weights unchanged. From step 6 on, both are the same.
    """
    optimizers = {"radam": torch.optim.RAdam, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    groups = _parameter_groups(captioner, section)
    is_fused = section.name != "radam" and groups[0]["params"][0].is_cuda  # RAdam has no fused kernel
    return optimizers[section.name](
        groups,
        lr=lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        # Without `foreach`, torch updates tensor by tensor on a CPU, which takes a fifth of a small model's step.
        **({"fused": True} if is_fused else {"foreach": True}),
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of each group to `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


def _parameter_groups(captioner: Captioner, section: OptimizerSection) -> list[Values]:
    """The trainable parameters in groups of equal settings. A group lists only what differs from the optimizer.

    The setting lr_factor multiplies the learning rate. For the backbone, the factor is
    backbone_lr_factor x layer_decay^(number of layers above the parameter's), as in BEiT (Bao et al. 2022), with the
    captioning model in place of the classifier.
    """
    factors: dict[str, float] = {}
    if captioner.backbone is not None:
        layers = captioner.backbone.num_layers_above() if section.layer_decay < 1 else {}
        factors = {
            f"backbone.{name}": section.backbone_lr_factor * section.layer_decay ** layers.get(name, 0)
            for name, _ in captioner.backbone.named_parameters()
        }
    linear = {
        each.weight for each in captioner.modules() if isinstance(each, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for name, parameter in captioner.named_parameters():
        if parameter.requires_grad:
            settings = {}
            if factors.get(name, 1.0) != 1.0:
                settings["lr_factor"] = factors[name]
            if section.decayed_weights == "linear" and parameter not in linear:
                settings["weight_decay"] = 0.0
            groups.setdefault(tuple(settings.items()), []).append(parameter)
    return [{"params": parameters, **dict(settings)} for settings, parameters in groups.items()]


class WeightAverage:
    """The average a of the trained weights w: after step t, counted from 0, a <- d a + (1 - d) w.

    d is `decay`, but at most (1 + t) / (WARM_UP_STEPS + t), so that the weights before the stage soon count little.
    The average needs as much memory as the weights.
    """

    def __init__(self, captioner: Captioner, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: each for name, each in captioner.named_parameters() if each.requires_grad}
        self.weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average with the current weights. step: the number of the optimizer step that made them."""
        decay = min(self.decay, (1 + step) / (WARM_UP_STEPS + step))
        for name, parameter in self.parameters.items():
            self.weights[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """During the context, the captioner has the average as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data, self.weights[name] = self.weights[name], parameter.data

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces the average by that of a checkpoint. weights: by parameter name."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
