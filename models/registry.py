"""Models by name."""

from __future__ import annotations

from models.base import CaptionModel, ModelConfig, ModelSizes
from models.expansionnet import ExpansionNet
from models.transformer import Transformer

MODELS: dict[str, type[ExpansionNet]] = {"expansionnet_v2": ExpansionNet, "transformer": Transformer}


def build_model(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """A model with weights drawn as the reference draws them (from torch's default generator).

    Raises ValueError for an unknown name, listing the known ones, and for sizes that do not fit.
    """
    if config.name not in MODELS:
        raise ValueError(f"model.name is {config.name!r}, which is unknown; known: {', '.join(sorted(MODELS))}")
    model = MODELS[config.name](config, sizes)
    model.init_weights()
    return model
