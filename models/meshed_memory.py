"""The Meshed-Memory Transformer (Cornia, Stefanini, Baraldi, Cucchiara, CVPR 2020): memory slots and meshed attention.

Shapes: B images, N image tokens, C feature width, K captions per image, R = B*K rows, T caption tokens, D width,
H heads, L encoder levels that a decoder layer attends to, M memory slots, V vocabulary.

Post-norm layers, LN(x + dropout(sublayer(x))), as the reference has them, also where its paper reads otherwise:

- the AddNorm of equation 9 is inside each cross-attention, c_i = LN(s + dropout(C(X_i, s))), one module and one norm
  for all levels; z = sum of a_i * c_i / sqrt(levels) has no residual and no norm of its own;
- every weight of two or more dimensions is drawn Xavier-uniform, the memories and the feed-forward's with them (the
  paper: memories normal, feed-forward as He); a memory counts as one map from M * D to D.

Where this differs from the reference: padded image tokens are masked by their lengths, in the encoder and in
cross-attention (the reference looks for rows that are exactly 0 after its first LayerNorm, which padding never is: it
is attended everywhere); new models have sinusoidal positions, as the paper says (the reference draws its frozen table
at random; an imported checkpoint brings its own); projected keys and values are kept between steps. PAD after a
caption needs no mask: a row depends only on the tokens before it.

Where the paper is open: softmax gates are a softmax over the levels for each channel, the scale stays; one-to-one and
last level attend to one level, without gate and scale; attention on attention replaces the output map of every
attention by (W_i [v, q] + b_i) * sigmoid(W_g [v, q] + b_g), v being the attended values and q the input of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
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
from models.config import MeshedMemoryConfig
from models.layers import (
    CrossAttention,
    Dropout,
    FeedForward,
    SelfAttention,
    attend,
    cached_for_steps,
    merge_heads,
    padding_bias,
    sinusoids,
    split_heads,
)
from models.token_embeddings import lm_head, token_embedding, token_macs


class MemoryAttention(SelfAttention):
    """Self-attention with M learned slots per head in addition to the keys and values of the input (equation 3).

    The slots are not projected: they are sqrt(D / H) m_k and sqrt(M) m_v. They are never masked.
    """

    def __init__(self, d_model: int, num_heads: int, num_slots: int, attention_on_attention: bool) -> None:
        super().__init__(d_model, num_heads, causal=False, attention_on_attention=attention_on_attention)
        self.num_slots = num_slots
        if num_slots:
            self.memory_keys = nn.Parameter(torch.empty(num_slots, d_model))
            self.memory_values = nn.Parameter(torch.empty(num_slots, d_model))

    def init_weights(self) -> None:
        super().init_weights()
        if self.num_slots:
            for memory in (self.memory_keys, self.memory_values):
                nn.init.xavier_uniform_(memory[None])  # the reference's (1, M, D): fans of M * D and D

    def forward(self, x: Tensor, valid_mask: Tensor | None = None) -> Tensor:
        """x (B, N, D); valid_mask (B, N) True at valid tokens, or None."""
        query, key, value = (split_heads(part, self.num_heads) for part in self.in_proj(x).chunk(3, -1))
        if self.num_slots:
            scale = math.sqrt(query.shape[-1])
            key = torch.cat((key, self._scaled_slots(self.memory_keys, scale, key)), 2)
            value = torch.cat((value, self._scaled_slots(self.memory_values, math.sqrt(self.num_slots), value)), 2)
        if valid_mask is not None:
            valid_mask = F.pad(valid_mask, (0, self.num_slots), value=True)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=padding_bias(valid_mask, query.dtype))
        return self.out_proj(merge_heads(mixed), x)

    def mixing_macs(self, length: float) -> float:
        return 2 * length * (length + self.num_slots) * self.in_proj.in_features

    def _scaled_slots(self, memory: Tensor, scale: float, like: Tensor) -> Tensor:
        """Scaled slots (B, H, M, D / H) in the dtype of `like`, the projections, which autocast may have chosen."""
        slots = split_heads(memory[None] * scale, self.num_heads)
        return slots.to(like.dtype).expand(like.shape[0], -1, -1, -1)


class LevelAttention(CrossAttention):
    """Cross-attention to several encoder levels with the same weights for all levels."""

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, L, H, N, D / H) of image tokens (B, L, N, D): once per image."""
        levels = states.shape[1]
        keys, values = super().project(states.flatten(0, 1))
        return keys.unflatten(0, (-1, levels)), values.unflatten(0, (-1, levels))

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The attended values (R, L, T, D) of queries from x (R, T, D); keys and values are those of B images."""
        length, width = x.shape[1:]
        images, levels = key.shape[:2]
        query = split_heads(self.query(x).view(images, -1, width), self.num_heads)  # (B, H, K*T, D / H)
        query = query[:, None].expand(-1, levels, -1, -1, -1).flatten(0, 1)
        if bias is not None:
            bias = bias.repeat_interleave(levels, 0)
        mixed = attend(query, key.flatten(0, 1), value.flatten(0, 1), bias)
        # (B*L, K*T, D) -> (R, L, T, D)
        mixed = merge_heads(mixed).view(images, levels, -1, length, width).transpose(1, 2).flatten(0, 1)
        return self.out_proj(mixed, x[:, None].expand_as(mixed))


class MeshedAttention(nn.Module):
    """Equations 6 to 8 over the levels that a layer attends to, with AddNorm for each level. One level has no gate."""

    def __init__(self, config: MeshedMemoryConfig, levels: int) -> None:
        super().__init__()
        self.attention = LevelAttention(config.d_model, config.num_heads, config.attention == "on_attention")
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.softmax = config.gates == "softmax"
        gated = config.connection == "meshed"
        self.gates = cast(
            Sequence[nn.Linear],
            nn.ModuleList(nn.Linear(2 * config.d_model, config.d_model) for _ in range(levels * gated)),
        )

    def forward(self, s: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """s (R, T, D), keys and values (B, L, H, N, D / H); (R, T, D)."""
        results = self.norm(s[:, None] + self.dropout(self.attention(s, key, value, bias)))  # (R, L, T, D)
        if not self.gates:
            return results[:, 0]
        gates = torch.stack(
            [gate(torch.cat((s, result), -1)) for gate, result in zip(self.gates, results.unbind(1), strict=True)], 1
        )
        gates = gates.softmax(1) if self.softmax else gates.sigmoid()
        return (gates * results).sum(1) / math.sqrt(len(self.gates))


class EncoderLayer(nn.Module):
    def __init__(self, config: MeshedMemoryConfig) -> None:
        super().__init__()
        width, attention_on_attention = config.d_model, config.attention == "on_attention"
        self.attention = MemoryAttention(width, config.num_heads, config.num_memory_slots, attention_on_attention)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, config.d_ff, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, valid_mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, valid_mask)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: MeshedMemoryConfig, index: int) -> None:
        super().__init__()
        width, levels = config.d_model, config.num_encoder_layers
        if config.connection == "meshed":
            self.levels = slice(0, levels)
        else:
            level = index if config.connection == "one_to_one" else levels - 1
            self.levels = slice(level, level + 1)
        self.attention = SelfAttention(
            width, config.num_heads, causal=True, attention_on_attention=config.attention == "on_attention"
        )
        self.attention_norm = nn.LayerNorm(width)
        self.meshed = MeshedAttention(config, levels)
        self.feed_forward = FeedForward(width, config.d_ff, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = Dropout(config.dropout)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, L, H, N, D / H) of all encoder levels (B, levels, N, D) that this layer attends to."""
        return self.meshed.attention.project(states[:, self.levels])

    def forward(self, y: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
        """y (R, T, D), states (B, levels, N, D)."""
        s = self.attention_norm(y + self.dropout(self.attention(y)))
        return self._after_self_attention(s, self.project(states), bias)

    def step(self, y: Tensor, cache: TreeCache, index: int) -> Tensor:
        """Passes the next token of each row, y (R, D), through this layer, whose index is `index`."""
        s = self.attention_norm(y + self.dropout(self.attention.step(y, cache.layers[index], cache.ancestors)))
        return self._after_self_attention(s[:, None], cache.cross[index], cache.bias)[:, 0]

    def _after_self_attention(self, s: Tensor, cross: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        z = self.meshed(s, *cross, bias)
        return self.feed_forward_norm(z + self.dropout(self.feed_forward(z)))


class MeshedMemoryTransformer(CaptionModel):
    """The Meshed-Memory Transformer. `encode` returns every encoder level, (B, levels, N, D)."""

    config: MeshedMemoryConfig

    def __init__(self, config: MeshedMemoryConfig, sizes: ModelSizes) -> None:
        super().__init__(config, sizes)
        width = config.d_model
        self.input = nn.Linear(sizes.feature_width, width)
        self.input_norm = nn.LayerNorm(width)
        self.input_dropout = Dropout(config.dropout)
        self.encoder = cast(
            Sequence[EncoderLayer], nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        )
        self.token_embedding = token_embedding(config, sizes)
        # positions of words start at 1, because the reference uses position 0 for padding
        self.register_buffer("positions", sinusoids(sizes.max_positions, width, first=1))
        self.decoder = cast(
            Sequence[DecoderLayer], nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_decoder_layers))
        )
        self.lm_head = lm_head(config, sizes, self.token_embedding, bias=False)

    def init_weights(self) -> None:
        """See the beginning of this file. Biases of attention and gates are 0, others as PyTorch draws them."""
        for module in self.modules():
            if isinstance(module, SelfAttention | CrossAttention):
                module.init_weights()
                for name, bias in module.named_parameters():
                    if name.endswith("bias"):
                        nn.init.zeros_(bias)
            elif isinstance(module, FeedForward):
                module.init_weights()
            elif isinstance(module, MeshedAttention):
                for gate in module.gates:
                    nn.init.xavier_uniform_(gate.weight)
                    nn.init.zeros_(gate.bias)
        for plain in (self.input, self.token_embedding, self.lm_head):
            nn.init.xavier_uniform_(plain.weight)

    def encode(self, features: Features) -> Memory:
        check_features(features, self.sizes.feature_width)
        x = F.relu(self.input(features.tokens.to(self.input.weight.dtype)))
        x = self.input_norm(self.input_dropout(x))
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        levels = []
        for layer in self.encoder:
            x = layer(x, valid_mask)
            levels.append(x)
        return Memory(torch.stack(levels, 1), features.lengths)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """Tokens (R, T) that start at `position`; neither scaled nor dropped, as in the reference."""
        check_positions(position + tokens.shape[1], self.sizes.max_positions)
        positions = cast(Tensor, self.positions)
        return self.token_embedding(tokens) + positions[position : position + tokens.shape[1]]

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        captions_per_image(memory, tokens.shape[0])
        bias = _bias(memory)
        y = self.embed(tokens, 0)
        for layer in self.decoder:
            y = layer(y, memory.states, bias)
        return self.lm_head(y)

    @torch.no_grad()
    def init_cache(self, memory: Memory, beams: int) -> TreeCache:
        images = memory.batch_size
        cross = [cached_for_steps(*layer.project(memory.states)) for layer in self.decoder]
        slots = [TreeSlots(beams) for _ in self.decoder]
        paths = torch.empty(images, beams, 0, dtype=torch.int64, device=memory.states.device)
        return TreeCache(images, beams, cross, _bias(memory), slots, paths)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, TreeCache]:
        assert isinstance(cache, TreeCache)
        y = self.embed(tokens[:, None], cache.length)[:, 0]
        cache.advance()
        for index, layer in enumerate(self.decoder):
            y = layer.step(y, cache, index)
        return self.lm_head(y), cache

    def macs(self, image_tokens: int) -> Macs:
        keys = token = 0
        for layer in self.decoder:
            cross, levels = layer.meshed.attention, len(range(self.config.num_encoder_layers)[layer.levels])
            keys += levels * image_tokens * linear_macs(cross.key_value)
            # all levels share the queries; each has its own attended values and output map
            token += linear_macs(layer) - linear_macs(cross.key_value) + (levels - 1) * linear_macs(cross.out_proj)
            token += levels * 2 * image_tokens * self.config.d_model  # scores and weighted sums of cross-attention
        linear = linear_macs(self.input, *self.encoder)
        return Macs(
            encoder=image_tokens * linear + sum(layer.attention.mixing_macs(image_tokens) for layer in self.encoder),
            keys=keys,
            token=token + token_macs(self.config, self.sizes),
            mixing=lambda length: sum(layer.attention.mixing_macs(length) for layer in self.decoder),
            step=lambda slots, length: sum(layer.attention.step_macs(slots, length) for layer in self.decoder),
        )


def _bias(memory: Memory) -> Tensor | None:
    """(B, 1, 1, N) to add to scores of cross-attention; None without padding."""
    return padding_bias(valid_tokens(memory.lengths, memory.states.shape[2]), memory.states.dtype)
