"""Multiply-accumulates of the systems that are made of attention: the Meshed-Memory Transformer.

Shapes: N image tokens, T caption tokens, D width, M memory slots, L encoder levels that a decoder layer attends to.
Counted are the products that this code runs in evaluation; element-wise work is not. `models/flops.py` adds them up.
"""

from __future__ import annotations

from models.config import MeshedMemoryConfig, ModelConfig, ModelSizes


def encoder_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int) -> float:
    """Of `encode` for an image."""
    d, n = config.d_model, image_tokens
    slots = config.memory_slots if isinstance(config, MeshedMemoryConfig) else 0
    mixer = (3 + _output(config)) * n * d * d + 2 * n * (n + slots) * d
    return n * sizes.feature_width * d + config.encoder_layers * (mixer + 2 * n * d * config.d_ff)


def decoder_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int, caption_tokens: float) -> float:
    """Of `decode` for an image with one caption."""
    d, t = config.d_model, caption_tokens
    own = (3 + _output(config)) * t * d * d + 2 * t * t * d
    layers = config.decoder_layers * (own + t * _after_self_attention(config, image_tokens))
    return layers + _keys(config, image_tokens) + t * d * sizes.vocabulary_size


def search_macs(config: ModelConfig, sizes: ModelSizes, image_tokens: int, beams: int, steps: int) -> float:
    """Of `steps` cached steps with `beams` beams of an image, cross-attention keys included.

    Products run over all slots of the image (`models/cache.py`), beams times steps so far.
    """
    d = config.d_model
    own = sum((3 + _output(config)) * d * d + 2 * beams * step * d for step in range(1, steps + 1))
    layers = config.decoder_layers * beams * (own + steps * _after_self_attention(config, image_tokens))
    return layers + _keys(config, image_tokens) + beams * steps * d * sizes.vocabulary_size


def _output(config: ModelConfig) -> int:
    """Products of D x D in what follows the heads; attention on attention maps 2 D to 2 D."""
    return 4 if isinstance(config, MeshedMemoryConfig) and config.attention == "on_attention" else 1


def _levels(config: ModelConfig) -> int:
    return config.encoder_layers if isinstance(config, MeshedMemoryConfig) and config.connection == "meshed" else 1


def _keys(config: ModelConfig, image_tokens: int) -> float:
    """Keys and values of cross-attention of all decoder layers: once an image."""
    return config.decoder_layers * 2 * _levels(config) * image_tokens * config.d_model**2


def _after_self_attention(config: ModelConfig, image_tokens: int) -> float:
    """Cross-attention without its keys, gates, and feed-forward, of one token in one layer."""
    d, levels = config.d_model, _levels(config)
    gates = 2 * levels * d * d if isinstance(config, MeshedMemoryConfig) and config.connection == "meshed" else 0
    return d * d + levels * (2 * image_tokens * d + _output(config) * d * d) + gates + 2 * d * config.d_ff
