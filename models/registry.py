"""Models by name."""

from __future__ import annotations

from models.base import CaptionModel, ModelConfig, ModelSizes
from models.clustformer import ClustFormer
from models.config import MODEL_CONFIGS
from models.expansionnet import ExpansionNet, Transformer
from models.meshed_memory import MeshedMemoryTransformer

MODELS: dict[str, type[CaptionModel]] = {
    "expansionnet_v2": ExpansionNet,
    "transformer": Transformer,
    "meshed_memory": MeshedMemoryTransformer,
    "clustformer": ClustFormer,
}


def build_model(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """A model with weights drawn as its reference draws them. ValueError for an unknown name or misfitting sizes."""
    if config.name not in MODELS:
        raise ValueError(f"model.name is {config.name!r}, which is unknown; known: {', '.join(sorted(MODELS))}")
    expected = MODEL_CONFIGS[config.name]
    if not isinstance(config, expected):
        raise ValueError(
            f"model.name is {config.name!r}, whose settings are {expected.__name__}, found {type(config).__name__}"
        )
    model = MODELS[config.name](config, sizes)
    model.init_weights()
    return model
