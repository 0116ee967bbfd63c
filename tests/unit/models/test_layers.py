"""Attention with few queries against torch's, and the settings of all systems that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig
from raycap.models.layers import MASKED_SCORE, attend, cached_for_steps


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
