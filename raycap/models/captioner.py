"""Builds captioners, which are a model and, if they read images, a backbone. Counts what a model costs."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raycap.models.base import CaptionModel, Features, Memory
from raycap.models.clustformer import ClustFormer, MaskTokenClustFormer
from raycap.models.config import BackboneConfig, ClustFormerConfig, ModelConfig, ModelSizes
from raycap.models.encoders.backbone import Backbone, prepare_to_compile
from raycap.models.expansionnet import ExpansionNet, Transformer
from raycap.models.layers import Layer
from raycap.models.meshed_memory import MeshedMemoryTransformer

MAX_FORMS = 64  # the largest number of versions of one layer that torch compiles


class Captioner(nn.Module):
    """A captioner of stored features (B, N, C), or with a backbone also of normalized images (B, 3, H, W)."""

    def __init__(self, model: CaptionModel, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.model = model
        self.backbone = backbone

    def without_backbone(self) -> Captioner:
        """Returns a captioner with the same model that reads only stored features."""
        return Captioner(self.model)

    def features(self, inputs: Features) -> Features:
        """Replaces pixels by the backbone's features, and returns stored features as they are.

        Raises ValueError for pixels if there is no backbone.
        """
        if inputs.tokens.ndim != 4:
            return inputs
        if self.backbone is None:
            raise ValueError("this captioner has no backbone: it works on stored features (images, tokens, width) only")
        return replace(inputs, tokens=self.backbone(inputs.tokens))

    def frozen_by(self, patterns: Sequence[str]) -> list[nn.Parameter]:
        """Returns the parameters whose names match one of the patterns.

        A pattern is the name of a parameter or module, with `*` and `?` as in file names. A module's name matches all
        parameters in it. Raises ValueError for a pattern that matches nothing, and if no trainable parameter remains.
        """
        parameters = dict(self.named_parameters())
        frozen: set[str] = set()
        for pattern in patterns:
            matching = {*fnmatch.filter(parameters, pattern), *fnmatch.filter(parameters, f"{pattern}.*")}
            if not matching:
                names = [*(name for name, _ in self.named_modules() if name), *parameters]
                close = difflib.get_close_matches(pattern, names, n=3) or names[:5]
                raise ValueError(f"freeze names {pattern!r}, which matches no parameter; names are {', '.join(close)}")
            frozen |= matching
        if not any(parameters[name].requires_grad for name in parameters.keys() - frozen):
            raise ValueError(f"freeze names {', '.join(patterns)}, and nothing is left to train; name fewer")
        return [parameters[name] for name in frozen]

    def compile_layers(self) -> None:
        """Makes torch compile every layer of the model and every block of the backbone at its first use, in place."""
        # The layers are compiled one by one, because workers would exchange the gradients of a captioner that is
        # compiled as a whole only after its backward pass. All blocks of a backbone are the same code, of which torch
        # compiles a version for each shape, mask and drop path, in training and in evaluation. The limit is raised,
        # because by default torch compiles 8 versions and leaves all others uncompiled.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_FORMS)
        for layer in self.model.modules():
            if isinstance(layer, Layer):
                layer.compile()
        if self.backbone is not None:
            prepare_to_compile(self.backbone)
            for block in self.backbone.blocks:
                # The stages of a backbone differ in size, but with dynamic sizes torch takes a minute for each version
                # of a Swin block, and fails at some.
                block.compile(dynamic=False)

    def encode(self, inputs: Features) -> Memory:
        return self.model.encode(self.features(inputs))

    def forward(self, inputs: Features, decoding: Tensor | Callable[[Memory], Any]) -> Any:
        """Returns teacher-forced logits (B*K, T, V), or the result of a function.

        decoding: tokens (B*K, T) for teacher forcing, or a function that gets the encoder's output.
        """
        # both cases are in this method, because data-parallel training exchanges only gradients that pass through it
        memory = self.encode(inputs)
        return decoding(memory) if callable(decoding) else self.model.decode(memory, decoding)


# the sizes for which ExpansionNet v2's Table VI counts multiply-accumulates
TABLE_6_IMAGES = 5000
TABLE_6_IMAGE_TOKENS = 144
TABLE_6_CAPTION_TOKENS = 12.5
TABLE_6_SIZES = ModelSizes(feature_width=1536, vocabulary_size=10000, max_positions=52, sos=0, eos=1, pad=2)


def _clustformer(config: ClustFormerConfig, sizes: ModelSizes) -> ClustFormer:
    return (MaskTokenClustFormer if config.decoder == "mask_token" else ClustFormer)(config, sizes)


MODELS: dict[str, Callable[..., CaptionModel]] = {
    "expansionnet_v2": ExpansionNet,
    "transformer": Transformer,
    "meshed_memory": MeshedMemoryTransformer,
    "clustformer": _clustformer,
}


def build_model(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """Builds a model and draws its weights as its reference does. Raises ValueError for sizes that do not fit."""
    model = MODELS[config.name](config, sizes)
    model.init_weights()
    return model


def build_captioner(config: ModelConfig, sizes: ModelSizes, backbone: BackboneConfig | None) -> Captioner:
    """Builds a captioner with random weights. Weights that the backbone's configuration names are not loaded."""
    # the backbone always comes first, because with a seed the random weights depend on the order
    built = None if backbone is None else Backbone(backbone, with_weights=False)
    return Captioner(build_model(config, sizes), built)


@dataclass(frozen=True)
class Cost:
    """The cost of a model without its backbone: multiply-accumulates of products per image, and parameters."""

    paper: float | None  # as ExpansionNet v2's Table VI counts (`ExpansionNet.paper_macs`), or None for other systems
    executed: float  # what this code computes for one caption in teacher forcing
    beam_search: float  # what this code computes in a beam search
    parameters: int


def model_on_meta(config: ModelConfig, sizes: ModelSizes) -> CaptionModel:
    """Builds a model without memory for its weights, which is enough to count them or to check the settings."""
    with torch.device("meta"):
        return build_model(config, sizes)


def cost(
    config: ModelConfig, sizes: ModelSizes, *, image_tokens: int, caption_tokens: float, beams: int = 5, steps: int = 19
) -> Cost:
    """Counts the cost of teacher forcing over `caption_tokens` tokens, and of a beam search of `steps` steps.

    By default, the search is for captions of 20 tokens, which take 19 steps because SOS is given.
    """
    parameters = sum(parameter.numel() for parameter in model_on_meta(config, sizes).parameters())
    shorter, longer = math.floor(caption_tokens), math.ceil(caption_tokens)
    model = model_on_meta(config, replace(sizes, max_positions=max(sizes.max_positions, longer, steps))).eval()
    # A model with attended_regions pads each image to that many regions, and attends to the padding.
    image_tokens = getattr(config, "attended_regions", None) or image_tokens
    with torch.device("meta"), torch.no_grad():
        boxes = torch.empty(1, image_tokens, 4) if config.needs_boxes else None
        features = Features(torch.empty(1, image_tokens, sizes.feature_width), boxes=boxes)
        memory = model.encode(features)

        def search() -> None:
            _, cache = model.step(torch.zeros(1, dtype=torch.int64), model.init_cache(memory, 1))
            cache = cache.expand_beams(beams)
            for _ in range(steps - 1):
                _, cache = model.step(torch.zeros(beams, dtype=torch.int64), cache)

        encoder = _macs(partial(model.encode, features))
        least, most = (
            _macs(partial(model.decode, memory, torch.zeros(1, length, dtype=torch.int64)))
            for length in (shorter, longer)
        )
        executed = encoder + least + (caption_tokens - shorter) * (most - least)
        paper = model.paper_macs(image_tokens, caption_tokens)
        return Cost(paper, executed, encoder + _macs(search), parameters)


def _macs(run: Callable[[], object]) -> float:
    """Counts the multiply-accumulates of the products in `run`."""
    in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **options: 2 * math.prod(a) * b[2]}  # torch counts it as 0
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops() / 2
