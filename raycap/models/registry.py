"""Models by name, and what they cost: multiply-accumulates per image, and parameters without a backbone.

`Cost.paper` counts as ExpansionNet v2's Table VI does (`ExpansionNet.paper_macs`). `Cost.executed` and
`Cost.beam_search` count the products that this code runs in evaluation (`CaptionModel.macs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raycap.models.base import CaptionModel
from raycap.models.captioner import Captioner
from raycap.models.clustformer import ClustFormer, MaskTokenClustFormer
from raycap.models.config import BackboneConfig, ClustFormerConfig, ModelConfig, ModelSizes
from raycap.models.encoders.backbone import Backbone
from raycap.models.expansionnet import ExpansionNet, Transformer
from raycap.models.meshed_memory import MeshedMemoryTransformer

# the sizes that Table VI counts for
TABLE_6_IMAGES = 5000
TABLE_6_IMAGE_TOKENS = 144
TABLE_6_CAPTION_TOKENS = 12.5
TABLE_6_SIZES = ModelSizes(feature_width=1536, vocabulary_size=10000, max_positions=52, sos=0, eos=1, pad=2)


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


def build_captioner(config: ModelConfig, sizes: ModelSizes, backbone: BackboneConfig | None) -> Captioner:
    """A captioner with random weights, which also replace those that the backbone's configuration names."""
    # The backbone first: with a seed, the random weights depend on the order.
    built = None if backbone is None else Backbone(backbone, with_weights=False)
    return Captioner(build_model(config, sizes), built)


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates per image (paper's accounting, as executed, beam search as executed), and parameters."""

    paper: float | None  # None: the paper has no such accounting of this system
    executed: float
    beam_search: float
    parameters: int


def model_on_meta(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """The model without memory for its weights, for counting and for checking its settings."""
    with torch.device("meta"):
        return build_model(config, sizes)


def cost(
    config: ModelConfig, sizes: ModelSizes, *, image_tokens: int, caption_tokens: float, beams: int = 5, steps: int = 19
) -> Cost:
    """The cost of teacher forcing over `caption_tokens`, and of a search of `steps` steps (20 tokens take 19)."""
    model = model_on_meta(config, sizes)
    macs = model.macs(image_tokens)
    return Cost(
        paper=model.paper_macs(image_tokens, caption_tokens),
        executed=macs.encoder + macs.decoder(caption_tokens),
        beam_search=macs.encoder + macs.search(beams, steps),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
