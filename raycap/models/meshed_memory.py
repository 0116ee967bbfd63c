"""The Meshed-Memory Transformer (Cornia, Stefanini, Baraldi, Cucchiara, CVPR 2020): memory slots and meshed attention.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
H heads, L encoder levels that a decoder layer attends to, M memory slots, V vocabulary.

Layers are post-norm, LN(x + dropout(sublayer(x))). Where paper and reference differ, this file follows the reference:

- The AddNorm of equation 9 is inside each cross-attention, c_i = LN(s + dropout(C(X_i, s))), with one module and one
  norm for all levels. The gated sum of the levels, z = sum of a_i * c_i / sqrt(levels), has neither residual nor norm.
- Every weight of two or more dimensions is drawn Xavier-uniform, also memory slots and feed-forward layers. (The paper
  draws slots from a normal distribution, feed-forward as He et al.) The slots count as one map from M * D to D.

This file differs from the reference in three ways:

- Padded image tokens are masked by their lengths, in the encoder and in cross-attention. The reference masks rows that
  are exactly 0 after its first LayerNorm, but padding never is, so that padding is not masked there.
- New models have sinusoidal positions, as the paper says. The reference draws a frozen table at random, which an
  imported checkpoint contains.
- Projected keys and values are cached between steps.

PAD after a caption needs no mask, because the output at a token depends only on the tokens up to it.

The paper does not give the details of its baselines. Here, softmax gates are a softmax over the levels for each
channel, and the sum is still divided by sqrt(levels). "one_to_one" and "last" attend to one level, without gate and
scale. Attention on attention replaces the output map of every attention by (W_i [v, q] + b_i) * sigmoid(W_g [v, q] +
b_g), where v are the attended values and q is the input of the queries.
"""

from __future__ import annotations

import math
import re
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import Features, Memory, valid_tokens
from raycap.models.config import MeshedMemoryConfig, ModelSizes
from raycap.models.decoding.cache import TreeCache
from raycap.models.dropout import Dropout
from raycap.models.layers import (
    CrossAttention,
    DecoderLayer,
    EncoderDecoder,
    FeedForward,
    Layer,
    SelfAttention,
    attend,
    layer_list,
    layer_outputs,
    lm_head,
    merge_heads,
    padding_bias,
    position_rows,
    sinusoids,
    split_heads,
    token_embedding,
)


class MemoryAttention(SelfAttention):
    """Self-attention with M learned keys sqrt(D / H) m_k and values sqrt(M) m_v per head (equation 3).

    These memory slots are never masked.
    """

    def __init__(self, config: MeshedMemoryConfig) -> None:
        on_attention = config.attention == "on_attention"
        super().__init__(config.d_model, config.num_heads, causal=False, attention_on_attention=on_attention)
        self.num_slots = config.num_memory_slots
        if self.num_slots:
            self.memory_keys = nn.Parameter(torch.empty(self.num_slots, config.d_model))
            self.memory_values = nn.Parameter(torch.empty(self.num_slots, config.d_model))

    def init_weights(self) -> None:
        super().init_weights()
        if self.num_slots:
            for memory in (self.memory_keys, self.memory_values):
                nn.init.xavier_uniform_(memory[None])  # (1, M, D) as in the reference, so that fans are M * D and D

    def forward(self, x: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """Mixes the tokens x (B, N, D). valid_mask: (B, N), True at valid tokens; None if all are valid."""
        query, key, value = self.project(x)
        if self.num_slots:
            scale = math.sqrt(query.shape[-1])
            key = torch.cat((key, self._scaled_slots(self.memory_keys, scale, key)), 2)
            value = torch.cat((value, self._scaled_slots(self.memory_values, math.sqrt(self.num_slots), value)), 2)
        if valid_mask is not None:
            valid_mask = F.pad(valid_mask, (0, self.num_slots), value=True)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=padding_bias(valid_mask, query.dtype))
        return self.out_proj(merge_heads(mixed), x)

    def _scaled_slots(self, memory: Tensor, scale: float, like: Tensor) -> Tensor:
        """Returns `memory` (M, D) times `scale` as (B, H, M, D / H), with the dtype and batch size of `like`."""
        slots = split_heads(memory[None] * scale, self.num_heads)
        return slots.to(like.dtype).expand(like.shape[0], -1, -1, -1)


class LevelAttention(CrossAttention):
    """Cross-attention to several encoder levels, with the same weights for all levels."""

    def __init__(self, config: MeshedMemoryConfig) -> None:
        super().__init__(config.d_model, config.num_heads, config.attention == "on_attention")

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys and values (B, L, H, N, D / H) of image tokens (B, L, N, D), once per image."""
        levels = states.shape[1]
        keys, values = super().project(states.flatten(0, 1))
        return keys.unflatten(0, (-1, levels)), values.unflatten(0, (-1, levels))

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Attends from x (R, T, D) to the keys and values of B images, at each level. Returns (R, L, T, D)."""
        length, width = x.shape[1:]
        images, levels = key.shape[:2]
        query = split_heads(self.query(x).view(images, -1, width), self.num_heads)  # (B, H, K*T, D / H)
        query = query[:, None].expand(-1, levels, -1, -1, -1).flatten(0, 1)  # (B*L, H, K*T, D / H)
        if bias is not None:
            bias = bias.repeat_interleave(levels, 0)
        mixed = attend(query, key.flatten(0, 1), value.flatten(0, 1), bias)
        # (B*L, K*T, D) -> (R, L, T, D)
        mixed = merge_heads(mixed).view(images, levels, -1, length, width).transpose(1, 2).flatten(0, 1)
        return self.out_proj(mixed, x[:, None].expand_as(mixed))


class MeshedAttention(nn.Module):
    """Equations 6 to 8 over the levels of a layer, with AddNorm at each level, and gates for "meshed"."""

    def __init__(self, config: MeshedMemoryConfig, levels: int) -> None:
        super().__init__()
        self.attention = LevelAttention(config)
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.softmax = config.gates == "softmax"
        gates = levels if config.connection == "meshed" else 0
        self.gates = nn.ModuleList(nn.Linear(2 * config.d_model, config.d_model) for _ in range(gates))

    def init_weights(self) -> None:
        for gate in self.gates:
            nn.init.xavier_uniform_(cast(nn.Linear, gate).weight)

    def forward(self, s: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Returns (R, T, D) for the decoder's states s (R, T, D), and keys and values (B, L, H, N, D / H)."""
        results = self.norm(s[:, None] + self.dropout(self.attention(s, key, value, bias)))  # (R, L, T, D)
        if not self.gates:
            return results[:, 0]
        levels = zip(self.gates, results.unbind(1), strict=True)
        scores = torch.stack([gate(torch.cat((s, result), -1)) for gate, result in levels], 1)
        weights = scores.softmax(1) if self.softmax else scores.sigmoid()
        return (weights * results).sum(1) / math.sqrt(len(self.gates))


class MeshedEncoderLayer(Layer):
    def __init__(self, config: MeshedMemoryConfig) -> None:
        super().__init__(config, pre_norm=False)
        self.attention = MemoryAttention(config)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        return self.transform(self.residual(x, self.attention_norm, self.attention, valid_mask))


class MeshedDecoderLayer(DecoderLayer):
    """Layer `index` (from 0) of the decoder. levels: the slice of encoder levels that the layer attends to."""

    def __init__(self, config: MeshedMemoryConfig, index: int) -> None:
        super().__init__(config, pre_norm=False)
        count = config.num_encoder_layers
        levels = {"meshed": (0, count), "one_to_one": (index, index + 1), "last": (count - 1, count)}
        self.levels = slice(*levels[config.connection])
        on_attention = config.attention == "on_attention"
        self.attention = SelfAttention(
            config.d_model, config.num_heads, causal=True, attention_on_attention=on_attention
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.meshed = MeshedAttention(config, self.levels.stop - self.levels.start)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys and values (B, L, H, N, D / H) of this layer's levels in `states` (B, levels, N, D)."""
        return self.meshed.attention.project(states[:, self.levels])

    def mix(self, y: Tensor, *context: object) -> Tensor:
        return self.residual(y, self.attention_norm, self.attention)

    def mix_step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        return self.residual(y, self.attention_norm, self.attention.step, cache.layers[index], cache.ancestors)

    def read_image(self, y: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        return self.transform(self.meshed(y, *cross, bias))


def with_padding(features: Features, count: int) -> Features:
    """Returns features with `count` tokens per image, padded with zeros. Raises ValueError for more regions."""
    tokens, lengths = features.tokens, features.lengths
    most = tokens.shape[1]
    if most > count and lengths is not None:  # lengths are read only if needed, because reading waits for the GPU
        most = int(lengths.max())
        tokens = tokens[:, :count]
    if most > count:
        raise ValueError(
            f"an image has {most} regions, and model.attended_regions is {count}; set features.max_regions to it, "
            "with features.truncate_regions"
        )
    valid_mask = valid_tokens(lengths, tokens.shape[1])
    if valid_mask is not None:
        tokens = tokens.masked_fill(~valid_mask[..., None], 0.0)
    return Features(F.pad(tokens, (0, 0, 0, count - tokens.shape[1])))


class MeshedMemoryTransformer(EncoderDecoder):
    """The Meshed-Memory Transformer. `encode` returns every encoder level, (B, levels, N, D)."""

    config: MeshedMemoryConfig

    def __init__(self, config: MeshedMemoryConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        self.input = nn.Linear(sizes.feature_width, config.d_model)
        self.input_norm = nn.LayerNorm(config.d_model)
        self.input_dropout = Dropout(config.dropout)
        self.encoder = layer_list(MeshedEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.token_embedding = token_embedding(config, sizes)
        # words have positions from 1 on, because the reference uses position 0 for padding
        self.register_buffer("positions", sinusoids(sizes.max_positions, config.d_model, first=1))
        self.decoder = layer_list(MeshedDecoderLayer(config, index) for index in range(config.num_decoder_layers))
        self.lm_head = lm_head(config, sizes, self.token_embedding, bias=False)

    def init_weights(self) -> None:
        """Draws weights as this file's docstring says. Attention and gates get biases of 0; others keep PyTorch's."""
        super().init_weights()
        for name, parameter in self.named_parameters():
            if re.search(r"\.(in_proj|out_proj|query|key_value|gates\.\d+)\.bias$", name):
                nn.init.zeros_(parameter)

    def encode(self, features: Features) -> Memory:
        if self.config.attended_regions is not None:
            features = with_padding(features, self.config.attended_regions)
        x = self.input_norm(self.input_dropout(F.relu(self.read_features(features))))
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        return Memory(torch.stack(layer_outputs(self.encoder, x, valid_mask), 1), features.lengths)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """See `EncoderDecoder.embed`. As in the reference, there is neither a scale nor dropout."""
        return self.token_embedding(tokens) + position_rows(cast(Tensor, self.positions), position, tokens.shape[1])
