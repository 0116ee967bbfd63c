"""Multiply-accumulates of the systems that are made of attention: Meshed-Memory Transformer and Ada-ClustFormer.

Shapes: N image tokens, T caption tokens, D width, M memory slots, L encoder levels that a decoder layer attends to.
Counted are the products that this code runs in evaluation; element-wise work is not, and so the clustering matrix
costs two vectors' products a token and axis. `models/macs.py` adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from models.config import ClustFormerConfig, MeshedMemoryConfig, ModelConfig, ModelSizes
from models.token_embeddings import word_macs


def encoder_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int) -> float:
    """Of `encode` for an image."""
    d, n, features = config.d_model, image_tokens, image_tokens * sizes.feature_width * config.d_model
    slots = config.num_memory_slots if isinstance(config, MeshedMemoryConfig) else 0
    clusters = 0
    if isinstance(config, ClustFormerConfig):
        axes = {"2d": 2, "1d": 1, "none": 0}[config.encoder_clusters]
        if config.inputs == "regions" and axes:  # dummies fill the last column
            n = math.ceil(n / config.region_rows) * config.region_rows
        clusters = _clustered(config, "encoder") * axes * 2 * _pooled(config, n) * d
    mixer = (3 + _output(config)) * n * d * d + 2 * n * (n + slots) * d
    return features + config.num_encoder_layers * (mixer + 2 * n * d * config.d_ff) + clusters


def decoder_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int, caption_tokens: float) -> float:
    """Of `decode` for an image with one caption."""
    d, t = config.d_model, caption_tokens
    own = (3 + _output(config)) * t * d * d + 2 * t * t * d
    layers = config.num_decoder_layers * (own + t * _after_self_attention(config, image_tokens))
    clusters = _clustered(config, "decoder") * 2 * t * d
    return layers + clusters + _keys(config, image_tokens) + t * word_macs(config, sizes)


def search_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int, beams: int, steps: int) -> float:
    """Of `steps` cached steps with `beams` beams of an image, cross-attention keys included.

    Products run over all slots of the image (`models/beam_cache.py`).
    """
    d = config.d_model
    each = config.num_decoder_layers * ((3 + _output(config)) * d * d + _after_self_attention(config, image_tokens))
    each += _clustered(config, "decoder") * 2 * d + word_macs(config, sizes)
    macs = _keys(config, image_tokens)
    for rows, slots in rows_and_slots(beams, steps):
        macs += rows * (each + config.num_decoder_layers * 2 * slots * d)
    return macs


def rows_and_slots(beams: int, steps: int) -> Iterator[tuple[int, int]]:
    """Rows that each of `steps` computes for an image, and the slots that it has then; all beams begin as one."""
    slots = 0
    for rows in [1, *[beams] * (steps - 1)][:steps]:
        slots += rows
        yield rows, slots


def _clustered(config: ModelConfig, side: str) -> int:
    """Layers of one side with maps of C."""
    if not isinstance(config, ClustFormerConfig) or config.window is not None:
        return 0
    if getattr(config, f"{side}_clusters") == "none":
        return 0
    chosen = getattr(config, f"clustered_{side}_layers")
    return getattr(config, f"num_{side}_layers") if chosen is None else len(chosen)


def _pooled(config: ClustFormerConfig, image_tokens: int) -> int:
    """Image tokens after down-up sampling."""
    if config.encoder_clusters == "1d":
        return -(-image_tokens // config.sampling)
    if config.inputs == "regions":
        return image_tokens
    rows, columns = config.grid or (math.isqrt(image_tokens), math.isqrt(image_tokens))
    return -(-rows // config.sampling) * -(-columns // config.sampling)


def _output(config: ModelConfig) -> int:
    """Products of D x D in what follows the heads; attention on attention maps 2 D to 2 D."""
    return 4 if isinstance(config, MeshedMemoryConfig) and config.attention == "on_attention" else 1


def _levels(config: ModelConfig) -> int:
    return config.num_encoder_layers if isinstance(config, MeshedMemoryConfig) and config.connection == "meshed" else 1


def _keys(config: ModelConfig, image_tokens: int) -> float:
    """Keys and values of cross-attention of all decoder layers: once an image."""
    return config.num_decoder_layers * 2 * _levels(config) * image_tokens * config.d_model**2


def _after_self_attention(config: ModelConfig, image_tokens: int) -> float:
    """Cross-attention without its keys, gates, and feed-forward, of one token in one layer."""
    d, levels = config.d_model, _levels(config)
    gates = 2 * levels * d * d if isinstance(config, MeshedMemoryConfig) and config.connection == "meshed" else 0
    return d * d + levels * (2 * image_tokens * d + _output(config) * d * d) + gates + 2 * d * config.d_ff
