"""Multiply-accumulates and parameters: the paper's table, and the products that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.captioner import TABLE_6_SIZES, build_model, cost
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.models.decoding.search import beam_search
from raycap.models.expansionnet import ExpansionNet
from raycap.pipeline.evaluation.comparison.published import ablation


def test_parameters_of_the_paper() -> None:
    for positions, expected in ((52, 38_593_296), (74, 38_604_560)):
        sizes = ModelSizes(1536, 10_000, positions, sos=0, eos=1, pad=2)
        assert cost(ExpansionNetConfig(), sizes, image_tokens=144, caption_tokens=12.5).parameters == expected


def test_table_6() -> None:
    assert len(ablation()) == 12
    for row in ablation():
        groups, vectors, printed = row.static_expansion, row.dynamic_expansion, row.macs
        config = ExpansionNetConfig(static_expansion=groups, dynamic_expansion=vectors)
        counted = cost(config, TABLE_6_SIZES, image_tokens=144, caption_tokens=12.5)
        assert 5000 * counted.paper == pytest.approx(printed, rel=1e-3)
    baseline = cost(ExpansionNetConfig(name="transformer"), TABLE_6_SIZES, image_tokens=144, caption_tokens=12.5)
    assert 5000 * baseline.paper == pytest.approx(9.28e12, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "mixers",
    [
        {"static_expansion": (3, 5), "dynamic_expansion": 4},
        {"static_expansion": None, "encoder_dynamic_expansion": 3, "dynamic_expansion": None},
        {"static_expansion": None, "dynamic_expansion": None},
    ],
)
def test_the_executed_products_are_those_that_torch_counts(mixers: dict[str, Any]) -> None:
    config = ExpansionNetConfig(d_model=32, d_ff=48, num_heads=4, **mixers)
    sizes = ModelSizes(40, 50, 30, sos=0, eos=1, pad=2)
    model = build_model(config, sizes).eval()
    assert isinstance(model, ExpansionNet)
    model.lm_head.bias[1] = -1e4
    features = torch.randn(2, 9, 40)

    def counted(run: Any) -> tuple[float, Any]:
        in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **options: 2 * a[0] * a[1] * a[2] * b[2]}
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            result = run()
        return (
            counter.get_total_flops() / 2 / 2,
            result,
        )  # two images, two operations a multiply-accumulate

    macs, memory = counted(lambda: model.encode(Features(features)))
    assert macs == model.macs(9).encoder
    macs, _ = counted(lambda: model.decode(memory, torch.zeros(2, 7, dtype=torch.int64)))
    assert macs == model.macs(9).decoder(7)
    macs, _ = counted(lambda: beam_search(model, memory, beam_size=3, max_length=9))
    assert macs == model.macs(9).search(3, 8)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_memory_slots": 0, "connection": "last"}, {"attention": "on_attention"}, {"connection": "one_to_one"}],
)
def test_the_products_of_the_meshed_model_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    values = {
        "d_model": 32,
        "d_ff": 48,
        "num_heads": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_memory_slots": 5,
    }
    same_products(MeshedMemoryConfig(**(values | changes)))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoder_clusters": "1d", "sampling": 4},
        {"window": 2},
        {"clustered_decoder_layers": (1,), "sampling": 1},
        {"decoder": "mask_token"},
        {"decoder": "mask_token", "word_vector_width": 6, "decoder_clusters": "none"},
    ],
)
def test_the_products_of_the_clustformer_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    values = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
    same_products(ClustFormerConfig(**(values | changes)))


def same_products(config: ModelConfig) -> None:
    sizes = ModelSizes(40, 50, 30, sos=0, eos=1, pad=2)
    model = build_model(config, sizes).eval()
    features = torch.randn(2, 9, 40)
    memory = model.encode(Features(features))
    runs: list[tuple[Any, float]] = [
        (lambda: model.encode(Features(features)), model.macs(9).encoder),
        (
            lambda: model.decode(memory, torch.zeros(2, 7, dtype=torch.int64)),
            model.macs(9).decoder(7),
        ),
        (lambda: eight_steps(model, memory, beams=3), model.macs(9).search(3, 8)),
    ]
    for run, expected in runs:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() / 2 / 2 == expected
    counted = cost(config, sizes, image_tokens=9, caption_tokens=7, beams=3, steps=8)
    assert counted.paper is None and counted.executed == runs[0][1] + runs[1][1]


def eight_steps(model: CaptionModel, memory: Memory, beams: int) -> None:
    """As captions are decoded: all beams of an image begin as one."""
    cache = model.init_cache(memory, 1)
    _, cache = model.step(torch.zeros(2, dtype=torch.int64), cache)
    cache = cache.expand_beams(beams)
    for _ in range(7):
        _, cache = model.step(torch.zeros(2 * beams, dtype=torch.int64), cache)
