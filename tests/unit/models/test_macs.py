"""Multiply-accumulates and parameters: the paper's table, and counts by hand."""

from __future__ import annotations

import pytest

from raycap.models.captioner import TABLE_6_SIZES, cost, model_on_meta
from raycap.models.config import ClustFormerConfig, ExpansionNetConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
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
