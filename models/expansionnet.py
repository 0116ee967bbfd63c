"""ExpansionNet v2 (Hu, Cavicchioli, Capotondi): an encoder and a decoder whose mixers are configuration.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
V vocabulary.

Pre-norm layers, x + dropout(sublayer(norm(x))); after the last layer x + dropout(Linear(all layers' outputs)), then a
LayerNorm, as in the reference. A decoder row depends only on tokens before it, so PAD after a
caption needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from models.base import (
    Cache,
    CaptionModel,
    Features,
    Macs,
    Memory,
    ModelSizes,
    captions_per_image,
    check_features,
    check_positions,
    linear_macs,
    valid_tokens,
)
from models.beam_cache import TreeCache, TreeSlots
from models.config import ExpansionNetConfig
from models.expansion import DynamicExpansion, Expansion, StaticExpansion
from models.layers import (
    CrossAttention,
    Dropout,
    FeedForward,
    SelfAttention,
    cached_for_steps,
    padding_bias,
    xavier_blocks_,
)
from models.token_embeddings import lm_head, token_embedding, token_macs


def encoder_mixer(config: ExpansionNetConfig) -> StaticExpansion | DynamicExpansion | SelfAttention:
    factorized = config.expansion_dropout == "factorized"
    if config.static_expansion is not None:
        return StaticExpansion(config.d_model, config.static_expansion, config.dropout, factorized)
    if config.encoder_dynamic_expansion is not None:
        return DynamicExpansion(config.d_model, config.encoder_dynamic_expansion, False, config.dropout, factorized)
    return SelfAttention(config.d_model, config.num_heads, causal=False)


def decoder_mixer(config: ExpansionNetConfig) -> DynamicExpansion | SelfAttention:
    if config.dynamic_expansion is not None:
        factorized = config.expansion_dropout == "factorized"
        return DynamicExpansion(config.d_model, config.dynamic_expansion, True, config.dropout, factorized)
    return SelfAttention(config.d_model, config.num_heads, causal=True)


class EncoderLayer(nn.Module):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer = encoder_mixer(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.mixer(self.mixer_norm(x), valid_mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer = decoder_mixer(config)
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross = CrossAttention(config.d_model, config.num_heads)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
        """x (R, T, D), states (B, N, D)."""
        key, value = self.cross.project(states)
        x = x + self.dropout(self.mixer(self.mixer_norm(x)))
        x = x + self.dropout(self.cross(self.cross_norm(x), key, value, bias))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def step(self, x: Tensor, cache: TreeCache, index: int) -> Tensor:
        """Passes the next token of each row, x (R, D), through this layer, whose index is `index`."""
        x = x + self.dropout(self.mixer.step(self.mixer_norm(x), cache.layers[index], cache.ancestors))
        x = x + self.dropout(self.cross(self.cross_norm(x)[:, None], *cache.cross[index], cache.bias)[:, 0])
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LayerSum(nn.Module):
    """x + dropout(Linear(concatenated outputs of all layers)), then LayerNorm."""

    def __init__(self, d_model: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Linear(layers * d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.norm(outputs[-1] + self.dropout(self.map(torch.cat(outputs, -1))))


class ExpansionNet(CaptionModel):
    """ExpansionNet v2. Its configuration raises ValueError for sizes that do not fit together."""

    config: ExpansionNetConfig

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_dropout = Dropout(config.dropout)
        self.encoder = cast(
            Sequence[EncoderLayer], nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        )
        self.encoder_sum = LayerSum(width, config.num_encoder_layers, config.dropout)
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.positions = nn.Embedding(sizes.max_positions, width)
        self.decoder = cast(
            Sequence[DecoderLayer], nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        )
        self.decoder_sum = LayerSum(width, config.num_decoder_layers, config.dropout)
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    def init_weights(self) -> None:
        """As in the reference: Xavier uniform for two or more dimensions; biases as PyTorch draws them."""
        for module in self.modules():
            if isinstance(module, Expansion | SelfAttention | CrossAttention | FeedForward):
                module.init_weights()
        for plain in (
            self.input,
            self.encoder_sum.map,
            self.token_embedding,
            self.positions,
            self.decoder_sum.map,
            self.lm_head,
        ):
            xavier_blocks_(plain.weight)

    def encode(self, features: Features) -> Memory:
        check_features(features, self.sizes.feature_width)
        x = self.input_dropout(self.input(features.tokens.to(self.input.weight.dtype)))
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        outputs = []
        for layer in self.encoder:
            x = layer(x, valid_mask)
            outputs.append(x)
        return Memory(self.encoder_sum(outputs), features.lengths)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Embeddings of tokens (R, T) from `position` on. As in the reference, dropout comes before the scale."""
        check_positions(position + tokens.shape[1], self.sizes.max_positions)
        words = self.word_dropout(self.token_embedding(tokens)) * math.sqrt(self.config.d_model)
        return words + self.positions.weight[position : position + tokens.shape[1]]

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        captions_per_image(memory, tokens.shape[0])
        bias = padding_bias(valid_tokens(memory.lengths, memory.states.shape[1]), memory.states.dtype)
        y = self.embed(tokens, 0)
        outputs = []
        for layer in self.decoder:
            y = layer(y, memory.states, bias)
            outputs.append(y)
        return self.lm_head(self.decoder_sum(outputs))

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        images = memory.batch_size
        bias = padding_bias(valid_tokens(memory.lengths, memory.states.shape[1]), memory.states.dtype)
        cross = [cached_for_steps(*layer.cross.project(memory.states)) for layer in self.decoder]
        slots = [TreeSlots(beams) for _ in self.decoder]
        paths = torch.empty(images, beams, 0, dtype=torch.int64, device=memory.states.device)
        return TreeCache(images, beams, cross, bias, slots, paths)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, TreeCache]:
        assert isinstance(cache, TreeCache)
        y = self.embed(tokens[:, None], cache.length)[:, 0]
        cache.advance()
        outputs = []
        for index, layer in enumerate(self.decoder):
            y = layer.step(y, cache, index)
            outputs.append(y)
        return self.lm_head(self.decoder_sum(outputs)), cache

    def macs(self, image_tokens: int) -> Macs:
        linear = linear_macs(self.input, *self.encoder, self.encoder_sum)
        key_value = sum(linear_macs(layer.cross.key_value) for layer in self.decoder)
        token = linear_macs(*self.decoder, self.decoder_sum) - key_value
        token += len(self.decoder) * 2 * image_tokens * self.config.d_model  # what cross-attention mixes
        return Macs(
            encoder=image_tokens * linear + sum(layer.mixer.mixing_macs(image_tokens) for layer in self.encoder),
            keys=image_tokens * key_value,
            token=token + token_macs(self.config, self.sizes),
            mixing=lambda length: sum(layer.mixer.mixing_macs(length) for layer in self.decoder),
            step=lambda slots, length: sum(layer.mixer.step_macs(slots, length) for layer in self.decoder),
        )

    def paper_macs(self, image_tokens: int, caption_tokens: float) -> float:
        """Table VI: one teacher-forced pass in the materialized form.

        A baseline self-attention is counted with 3 projections, and one of the encoder's two maps from 1536 to 512 is
        left out. The captioner alone, without a backbone.
        """
        config, n, t = self.config, image_tokens, caption_tokens
        d, word = config.d_model, self.config.d_model * self.sizes.vocabulary_size

        def dynamic(vectors: int, length: float) -> float:
            return 5 * length * d * d + 5 * vectors * length * length * d

        def attention(length: float) -> float:
            return 3 * length * d * d + 2 * length * length * d

        if config.static_expansion is not None:
            encoder = 4.0 * n * d * d + 5 * sum(config.static_expansion) * n * d
        elif config.encoder_dynamic_expansion is not None:
            encoder = dynamic(config.encoder_dynamic_expansion, n)
        else:
            encoder = attention(n)
        decoder = attention(t) if config.dynamic_expansion is None else dynamic(config.dynamic_expansion, t)
        cross = 2 * t * d * d + 2 * n * d * d + 2 * t * n * d
        encoder = config.num_encoder_layers * (encoder + 2 * n * d * config.d_ff) + n * self.sizes.feature_width * d
        decoder = config.num_decoder_layers * (decoder + cross + 2 * t * d * config.d_ff + t * d * d)
        return encoder + decoder + t * word


# The papers' baseline Transformer: ExpansionNet's skeleton with multi-head self-attention in place of the expansions.
# No public code has it, so that no parity is claimed.


class Transformer(ExpansionNet):
    """The baseline Transformer. It replaces the expansion settings of its configuration by null."""

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        attention = replace(config, static_expansion=None, encoder_dynamic_expansion=None, dynamic_expansion=None)
        super().__init__(attention, sizes)
