"""Attention with few queries against torch's, refused settings, multiply-accumulates and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raycap.models.captioner import TABLE_6_SIZES, cost, model_on_meta
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from raycap.models.layers import MASKED_SCORE, attend, cached_for_steps
from raycap.pipeline.evaluation.comparison.published import published_tables

SMALL = {"d_model": 32, "d_ff": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}


def test_parameters_of_the_paper() -> None:
    for positions, expected in ((52, 38_593_296), (74, 38_604_560)):
        sizes = ModelSizes(1536, 10_000, positions, sos=0, eos=1, pad=2)
        assert cost(ExpansionNetConfig(), sizes, image_tokens=9, caption_tokens=2, steps=1).parameters == expected


def test_table_6() -> None:
    (table,) = published_tables("expansionnet_v2")
    assert len(table.rows) == 12
    for row in table.rows:
        counted = model_on_meta(ExpansionNetConfig(**row.settings), TABLE_6_SIZES).paper_macs(144, 12.5)
        assert 5000 * counted == pytest.approx(row.macs, rel=1e-3)
    baseline = model_on_meta(ExpansionNetConfig(name="transformer"), TABLE_6_SIZES).paper_macs(144, 12.5)
    assert 5000 * baseline == pytest.approx(9.28e12, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "executed", "searched"),
    [
        (ExpansionNetConfig(**SMALL, static_expansion=(3, 5), dynamic_expansion=4), 426_128, 5_196_672),  # type: ignore[arg-type]
        (MeshedMemoryConfig(**SMALL, num_memory_slots=5), 464_704, 3_753_664),  # type: ignore[arg-type]
        (ClustFormerConfig(**SMALL), 344_256, 2_687_040),  # type: ignore[arg-type]
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_products_are_those_that_formulas_give(config: ModelConfig, executed: int, searched: int) -> None:
    """The numbers come from closed formulas for each system."""
    for positions in (30, 5):  # the count needs no more positions than the model has
        sizes = ModelSizes(40, 50, positions, sos=0, eos=1, pad=2)
        counted = cost(config, sizes, image_tokens=9, caption_tokens=7)
        assert (counted.executed, counted.beam_search) == (executed, searched)
    half = cost(config, sizes, image_tokens=9, caption_tokens=7.5, steps=1).executed
    assert executed < half < cost(config, sizes, image_tokens=9, caption_tokens=8, steps=1).executed


@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_attention_of_few_queries_is_torchs(precision: torch.dtype, queries: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(2, 3, queries, 8, generator=generator).to(precision)
    key, value = (torch.randn(2, 3, 11, 8, generator=generator).to(precision) for _ in range(2))
    bias = torch.zeros(2, 1, 1, 11).masked_fill_(torch.rand(2, 1, 1, 11, generator=generator) < 0.3, MASKED_SCORE)
    bias = bias.to(precision)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=bias.double())
    kept = cached_for_steps(key, value)
    assert kept[0].mT.is_contiguous() and kept[1].is_contiguous()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[precision]
    for pair in ((key, value), kept):
        torch.testing.assert_close(attend(query, *pair, bias).double(), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (ExpansionNetConfig, {"num_heads": 7}, "model.num_heads"),
        (ExpansionNetConfig, {"encoder_dynamic_expansion": 4}, "model.encoder_dynamic_expansion"),
        (MeshedMemoryConfig, {"connection": "one_to_one", "num_encoder_layers": 2}, "model.connection"),
        (ClustFormerConfig, {"inputs": "regions"}, "model.sampling"),
        (ClustFormerConfig, {"clustered_decoder_layers": (2, 2)}, "model.clustered_decoder_layers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Any, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        config(**changes)
