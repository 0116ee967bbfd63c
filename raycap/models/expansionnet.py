"""ExpansionNet v2 (Hu, Cavicchioli, Capotondi): an encoder and a decoder whose mixers are configuration.

Shapes: B images, N image tokens, R caption rows, T caption tokens, D width, V vocabulary.

Layers are pre-norm, x + dropout(sublayer(norm(x))). After the last layer follow x + dropout(Linear(all layers'
outputs)) and a LayerNorm, as in the reference. A decoder row depends only on tokens before it, so that PAD after a
caption needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from raycap.models.base import Features, Macs, Memory, ModelSizes, linear_macs, valid_tokens
from raycap.models.config import ExpansionNetConfig
from raycap.models.decoding.cache import TreeCache
from raycap.models.encoder_decoder import DecoderLayer, EncoderDecoder, Layer, layer_list, layer_outputs, position_rows
from raycap.models.expansion import DynamicExpansion, StaticExpansion
from raycap.models.layers import Dropout, SelfAttention
from raycap.models.token_embeddings import lm_head, token_embedding


def dynamic_mixer(config: ExpansionNetConfig, vectors: int | None, causal: bool) -> DynamicExpansion | SelfAttention:
    """Dynamic expansion with `vectors` per token, or attention when that is None."""
    if vectors is None:
        return SelfAttention(config.d_model, config.num_heads, causal)
    factorized = config.expansion_dropout == "factorized"
    return DynamicExpansion(config.d_model, vectors, causal, config.dropout, factorized)


class ExpansionEncoderLayer(Layer):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__(config, pre_norm=True)
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer: StaticExpansion | DynamicExpansion | SelfAttention
        if config.static_expansion is not None:
            factorized = config.expansion_dropout == "factorized"
            self.mixer = StaticExpansion(config.d_model, config.static_expansion, config.dropout, factorized)
        else:
            self.mixer = dynamic_mixer(config, config.encoder_dynamic_expansion, causal=False)
        self.add_feed_forward(config)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        return self.transform(self.residual(x, self.mixer_norm, self.mixer, valid_mask))


class ExpansionDecoderLayer(DecoderLayer):
    def __init__(self, config: ExpansionNetConfig) -> None:
        super().__init__(config, pre_norm=True)
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.mixer = dynamic_mixer(config, config.dynamic_expansion, causal=True)
        self.add_cross_attention(config)
        self.add_feed_forward(config)

    def mix(self, y: Tensor, *context: Any) -> Tensor:
        return self.residual(y, self.mixer_norm, self.mixer)

    def mix_step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        return self.residual(y, self.mixer_norm, self.mixer.step, cache.layers[index], cache.ancestors)


class LayerSum(nn.Module):
    """x + dropout(Linear(concatenated outputs of all layers)), then LayerNorm."""

    def __init__(self, d_model: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Linear(layers * d_model, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.norm(outputs[-1] + self.dropout(self.map(torch.cat(outputs, -1))))


class ExpansionNet(EncoderDecoder):
    """ExpansionNet v2. Its configuration raises ValueError for sizes that do not fit together."""

    config: ExpansionNetConfig

    encoder: Sequence[ExpansionEncoderLayer]
    decoder: Sequence[ExpansionDecoderLayer]

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_dropout = Dropout(config.dropout)
        self.encoder = layer_list(ExpansionEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.encoder_sum = LayerSum(width, config.num_encoder_layers, config.dropout)
        self.token_embedding = token_embedding(config, sizes)
        self.word_dropout = Dropout(config.dropout)
        self.positions = nn.Embedding(sizes.max_positions, width)
        self.decoder = layer_list(ExpansionDecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.decoder_sum = LayerSum(width, config.num_decoder_layers, config.dropout)
        self.lm_head = lm_head(config, sizes, self.token_embedding)

    @property
    def plain_maps(self) -> tuple[nn.Linear | nn.Embedding, ...]:
        words = (self.token_embedding, self.positions)
        return self.input, self.encoder_sum.map, *words, self.decoder_sum.map, self.lm_head

    def encode(self, features: Features) -> Memory:
        x = self.input_dropout(self.read_features(features))
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        return Memory(self.encoder_sum(layer_outputs(self.encoder, x, valid_mask)), features.lengths)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """As in the reference, dropout comes before the scale."""
        positions = position_rows(self.positions.weight, position, tokens.shape[1])
        return self.word_dropout(self.token_embedding(tokens)) * math.sqrt(self.config.d_model) + positions

    def logits(self, outputs: list[Tensor]) -> Tensor:
        return self.lm_head(self.decoder_sum(outputs))

    def macs(self, image_tokens: int) -> Macs:
        macs = super().macs(image_tokens)
        encoder = macs.encoder + image_tokens * linear_macs(self.encoder_sum)
        return replace(macs, encoder=encoder, token=macs.token + linear_macs(self.decoder_sum))

    def paper_macs(self, image_tokens: int, caption_tokens: float) -> float:
        """See `CaptionModel.paper_macs`: one teacher-forced pass in the materialized form, as in Table VI.

        A baseline self-attention is counted with 3 projections, and one of the encoder's two maps from 1536 to 512 is
        left out. The backbone is not counted.
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


class Transformer(ExpansionNet):
    """The papers' baseline: self-attention in place of all expansions, whose settings it ignores.

    No public code has it, so that no parity is claimed.
    """

    def __init__(self, config: ExpansionNetConfig, sizes: ModelSizes) -> None:
        attention = replace(config, static_expansion=None, encoder_dynamic_expansion=None, dynamic_expansion=None)
        super().__init__(attention, sizes)
