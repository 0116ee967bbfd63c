"""What a captioner costs: multiply-accumulates of an image, and parameters.

Shapes: N image tokens, T caption tokens, D width, E expanded vectors of the static expansion, N_E of the dynamic one.

Two accountings. `paper_macs` is Table VI's of ExpansionNet v2 (specs item 14): one teacher-forced pass of 12.5 tokens,
the materialized form, a baseline self-attention counted with 3 projections, and one of the encoder's two maps from
1536 to 512 left out. `executed_macs` counts the products that this code runs in evaluation: the factorized form, all
maps. Element-wise work is in neither. The paper's accounting is of its own systems; the products of the others are
counted in `models/macs_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from models import macs_attention as flops_attention
from models.base import ModelConfig, ModelSizes
from models.config import ExpansionNetConfig
from models.registry import build_model
from models.token_embeddings import word_macs

TABLE_6_IMAGES = 5000
TABLE_6_IMAGE_TOKENS = 144
TABLE_6_CAPTION_TOKENS = 12.5
TABLE_6_SIZES = ModelSizes(feature_width=1536, vocabulary_size=10000, max_positions=52, sos=0, eos=1, pad=2)


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates of an image (paper's accounting, as executed, beam search as executed), parameters."""

    paper: float | None  # None: the paper has no such accounting of this system
    executed: float
    beam_search: float
    parameters: int


def cost(
    config: ModelConfig, sizes: ModelSizes, *, image_tokens: int, caption_tokens: float, beams: int = 5, steps: int = 19
) -> Cost:
    """`caption_tokens` of a teacher-forced pass; a beam search of `steps` steps (20 tokens with SOS are 19)."""
    parameters = count_parameters(config, sizes)
    if not isinstance(config, ExpansionNetConfig):
        encoder = flops_attention.encoder_macs(config, sizes, image_tokens)
        executed = encoder + flops_attention.decoder_macs(config, sizes, image_tokens, caption_tokens)
        search = encoder + flops_attention.search_macs(config, sizes, image_tokens, beams, steps)
        return Cost(None, executed, search, parameters)
    if config.name == "transformer":
        config = replace(config, static_expansion=None, encoder_dynamic_expansion=None, dynamic_expansion=None)
    paper = paper_macs(config, sizes, image_tokens, caption_tokens)
    executed = encoder_macs(config, sizes, image_tokens) + decoder_macs(config, sizes, image_tokens, caption_tokens)
    search = encoder_macs(config, sizes, image_tokens) + search_macs(config, sizes, image_tokens, beams, steps)
    return Cost(paper, executed, search, parameters)


def count_parameters(config: ModelConfig, sizes: ModelSizes) -> int:
    """Of the captioner, without a backbone; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config, sizes).parameters())


def paper_macs(config: ExpansionNetConfig, sizes: ModelSizes, image_tokens: int, caption_tokens: float) -> float:
    """Multiply-accumulates of an image as Table VI counts them."""
    d, n, t = config.d_model, image_tokens, caption_tokens
    own: float
    if config.static_expansion is not None:
        mixer = 4 * n * d * d + 5 * sum(config.static_expansion) * n * d
    elif config.encoder_dynamic_expansion is not None:
        mixer = 5 * n * d * d + 5 * config.encoder_dynamic_expansion * n * n * d
    else:
        mixer = 3 * n * d * d + 2 * n * n * d
    encoder = n * sizes.feature_width * d + config.num_encoder_layers * (mixer + 2 * n * d * config.d_ff)
    if config.dynamic_expansion is not None:
        own = 5 * t * d * d + 5 * config.dynamic_expansion * t * t * d
    else:
        own = 3 * t * d * d + 2 * t * t * d
    cross = 2 * t * d * d + 2 * n * d * d + 2 * t * n * d
    layers = config.num_decoder_layers * (own + cross + 2 * t * d * config.d_ff)
    return encoder + layers + config.num_decoder_layers * t * d * d + t * d * sizes.vocabulary_size


def encoder_macs(config: ExpansionNetConfig, sizes: ModelSizes, image_tokens: int) -> float:
    """Multiply-accumulates of `encode` for an image."""
    d, n = config.d_model, image_tokens
    mixer: float
    if config.static_expansion is not None:
        # maps; M; R F^T of both streams; R bias; across V
        vectors = sum(config.static_expansion)
        mixer = 4 * n * d * d + vectors * n * d + 2 * vectors * n * n + 2 * vectors * n * d + 2 * n * n * d
    elif config.encoder_dynamic_expansion is not None:
        mixer = _dynamic_macs(d, config.encoder_dynamic_expansion, n)
    else:
        mixer = 4 * n * d * d + 2 * n * n * d
    layers = config.num_encoder_layers * (mixer + 2 * n * d * config.d_ff)
    return n * sizes.feature_width * d + layers + config.num_encoder_layers * n * d * d


def _dynamic_macs(d: int, vectors: int, length: float) -> float:
    """Maps; c k; e k; R F^T, R bias, across V and a C of both streams."""
    square = length * length
    return (
        5 * length * d * d + square * d + vectors * length * d + 2 * vectors * square * length
        + 2 * vectors * length * d + 4 * square * d
    )  # fmt: skip


def decoder_macs(config: ExpansionNetConfig, sizes: ModelSizes, image_tokens: int, caption_tokens: float) -> float:
    """Multiply-accumulates of `decode` for an image with one caption."""
    d, n, t = config.d_model, image_tokens, caption_tokens
    if config.dynamic_expansion is not None:
        own = _dynamic_macs(d, config.dynamic_expansion, t)
    else:
        own = 4 * t * d * d + 2 * t * t * d
    cross = 2 * t * d * d + 2 * n * d * d + 2 * t * n * d
    layers = config.num_decoder_layers * (own + cross + 2 * t * d * config.d_ff)
    return layers + config.num_decoder_layers * t * d * d + t * word_macs(config, sizes)


def search_macs(config: ExpansionNetConfig, sizes: ModelSizes, image_tokens: int, beams: int, steps: int) -> float:
    """Multiply-accumulates of `steps` cached steps with `beams` beams of an image, cross-attention keys included.

    Products run over all slots of the image (`models/beam_cache.py`).
    """
    d, n = config.d_model, image_tokens
    each = config.num_decoder_layers * (3 * d * d + 2 * n * d + 2 * d * config.d_ff) + word_macs(config, sizes)
    macs = config.num_decoder_layers * 2.0 * n * d * d
    for step, (rows, slots) in enumerate(flops_attention.rows_and_slots(beams, steps), 1):
        if config.dynamic_expansion is not None:
            # maps; e k; c k and k c; R F^T of both streams; R bias; a C and across V of both
            vectors = config.dynamic_expansion
            own = 5 * d * d + vectors * d + 2 * slots * d + 2 * slots * vectors * step + 2 * vectors * d + 4 * slots * d
        else:
            own = 4 * d * d + 2 * slots * d
        macs += rows * (each + config.num_decoder_layers * own)
    return macs
