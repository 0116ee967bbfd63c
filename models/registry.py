"""Models by name."""

from __future__ import annotations

from models.base import CaptionModel, ModelConfig, ModelSizes
from models.clustformer import ClustFormer
from models.expansionnet import ExpansionNet, Transformer
from models.meshed_memory import MeshedMemoryTransformer

MODELS: dict[str, type[CaptionModel]] = {
    "expansionnet_v2": ExpansionNet,
    "transformer": Transformer,
    "meshed_memory": MeshedMemoryTransformer,
    "clustformer": ClustFormer,
}


def build_model(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """A model with weights drawn as its reference draws them. ValueError for sizes that do not fit together."""
    model = MODELS[config.name](config, sizes)
    model.init_weights()
    return model
