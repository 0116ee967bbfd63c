"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raycap.models.base import CaptionModel, ModelConfig, ModelSizes
from raycap.models.clustformer import ClustFormer
from raycap.models.config import ClustFormerConfig
from raycap.models.expansionnet import ExpansionNet, Transformer
from raycap.models.mask_token import MaskTokenClustFormer
from raycap.models.meshed_memory import MeshedMemoryTransformer


def _clustformer(config: ClustFormerConfig, sizes: ModelSizes) -> ClustFormer:
    return (MaskTokenClustFormer if config.decoder == "mask_token" else ClustFormer)(config, sizes)


MODELS: dict[str, Callable[[Any, ModelSizes], CaptionModel]] = {
    "expansionnet_v2": ExpansionNet,
    "transformer": Transformer,
    "meshed_memory": MeshedMemoryTransformer,
    "clustformer": _clustformer,
}


def build_model(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """A model with weights drawn as its reference draws them. ValueError for sizes that do not fit together."""
    model = MODELS[config.name](config, sizes)
    model.init_weights()
    return model
