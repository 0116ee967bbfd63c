"""Learning rates against recorded values and the schedules' definitions, and the groups of parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from raycap.models.captioner import Captioner
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.sections import OptimizerSection, ScheduleSection
from raycap.pipeline.training.optimizer import learning_rate, make_optimizer, set_rate
from tests.conftest import ROOT
from tests.support.backbones import FAMILIES, small_captioner

GOLDEN = Path(__file__).resolve().parents[2] / "parity" / "golden"


def test_learning_rates_of_the_four_stages() -> None:
    for record in json.loads((GOLDEN / "lr_schedules.json").read_text()).values():
        schedule = ScheduleSection(
            name="hyperbolic",
            warmup_iterations=record["warmup_iterations"],
            decay=record["anneal_coefficient"],
            decay_every_epochs=record["anneal_every_epochs"],
            min_lr=record["min_lr"],
        )
        for iteration, expected in zip(record["iterations"], record["lr"], strict=True):
            rate = learning_rate(
                schedule,
                record["base_lr"],
                iteration,
                steps_per_epoch=record["iterations_per_epoch"],
                total_steps=10**6,
            )
            assert rate == pytest.approx(expected, rel=1e-12)


def test_the_schedule_of_the_clustformers_code_is_noams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCAP_COCO", "/somewhere")
    stage = load_config(ROOT / "raycap" / "configs" / "clustformer_code_coco.yaml").stage("xe")
    assert stage.optimizer.betas == (0.9, 0.98) and stage.optimizer.eps == 1e-9
    for step in (0, 1, 999, 19_998, 19_999, 20_000, 56_643):
        count = step + 1
        expected = 512**-0.5 * min(count**-0.5, count * 20_000**-1.5)
        rate = learning_rate(stage.schedule, stage.lr, step, steps_per_epoch=2832, total_steps=10**6)
        assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(1, 1), (1, 40), (7, 40), (40, 40)])
def test_the_cosine_falls_to_min_lr_in_the_last_step(warmup: int, total: int) -> None:
    """Against torch's scheduler, which starts at the last step of the warm-up."""
    schedule = ScheduleSection(name="cosine", warmup_iterations=warmup, min_lr=0.2)
    rates = [learning_rate(schedule, 3.0, step, steps_per_epoch=10, total_steps=total) for step in range(total)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total - warmup), eta_min=0.2)
    expected = [3.0 * (step + 1) / warmup for step in range(min(warmup, total))]
    for _ in range(total - warmup):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, rel=1e-9)
    if total > warmup:
        assert rates[warmup - 1] == 3.0 and rates[-1] == pytest.approx(0.2)


def settings_of(captioner: Captioner, key: str, **values: Any) -> dict[str, float]:
    """The value of a key in the group of each parameter, by the parameter's name; 1 for a group without the key."""
    optimizer = make_optimizer(captioner, OptimizerSection(**values), 0.1)
    names = {parameter: name for name, parameter in captioner.named_parameters()}
    found = {names[each]: group.get(key, 1.0) for group in optimizer.param_groups for each in group["params"]}
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_have_timms_rates(family: str) -> None:
    """A layer that timm does not know stands for the captioning model."""
    captioner = small_captioner(family)
    ours = settings_of(captioner, "lr_factor", layer_decay=0.7, backbone_lr_factor=0.5)
    assert captioner.backbone is not None
    network = captioner.backbone.network
    network.add_module("captioning_model", nn.Linear(1, 1))
    names = {parameter: name for name, parameter in captioner.named_parameters()}
    theirs = {
        names[each]: 0.5 * group["lr_scale"]
        for group in param_groups_layer_decay(network, layer_decay=0.7)
        for each in group["params"]
        if "captioning_model" not in names[each]
    }
    assert {name: factor for name, factor in ours.items() if name.startswith("backbone.")} == pytest.approx(theirs)
    assert all(factor == 1.0 for name, factor in ours.items() if name.startswith("model."))
    assert len(set(theirs.values())) >= 3


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_only_linear_layers_decay(family: str) -> None:
    """One step of AdamW without a gradient multiplies a weight by 1 - rate x decay, or leaves it as it is."""
    captioner = small_captioner(family)
    before = {name: each.detach().clone() for name, each in captioner.named_parameters()}
    for parameter in captioner.parameters():
        parameter.grad = torch.zeros_like(parameter)
    section = OptimizerSection(name="adamw", weight_decay=0.5, decayed_weights="linear", backbone_lr_factor=0.1)
    optimizer = make_optimizer(captioner, section, 0.1)
    set_rate(optimizer, 0.1)
    optimizer.step()
    spared = (
        r"\.bias(es)?$|norm|\.bn\d|embedding|positions|queries|pos_embed|_token$|_table$|gamma|downsample\.1|[qkv]_bias"
    )
    num_decayed = 0
    for name, parameter in captioner.named_parameters():
        rate = 0.01 if name.startswith("backbone.") else 0.1
        decays = re.search(spared, name) is None
        num_decayed += decays
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.5 * rate if decays else 1), msg=name)
    assert 10 < num_decayed < len(before) / 2
