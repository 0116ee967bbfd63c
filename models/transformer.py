"""The papers' baseline Transformer: ExpansionNet's skeleton with multi-head self-attention in place of the expansions.

It is in no public code (specs item 13), so no parity with anything is claimed.
"""

from __future__ import annotations

from dataclasses import replace

from models.base import ModelSizes
from models.config import ExpansionNetConfig
from models.expansionnet import ExpansionNet


class Transformer(ExpansionNet):
    """The expansion settings of the configuration do not apply and are taken as null."""

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        attention = replace(config, static_expansion=None, encoder_dynamic_expansion=None, dynamic_expansion=None)
        super().__init__(attention, sizes)
