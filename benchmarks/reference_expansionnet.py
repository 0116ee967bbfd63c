"""ExpansionNet v2 written like its equations. Tests and benchmarks compare the fast form with it.

As in the reference, the expanded sequences and the dynamic queries `c_s + e_n` exist in memory, every linear map is a
separate product, and each decoding step runs the whole prefix again for every beam, cross-attention keys included.
Training and captioning do not use it.

Shapes: B sequences (images, or captions with their image repeated), N image tokens, T caption tokens, E expanded
vectors, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Features, Memory, map_tensors, valid_tokens
from raycap.models.expansionnet import DynamicExpansion, ExpansionNet, StaticExpansion
from raycap.models.layers import SelfAttention

EPSILON = 1e-9  # of equation 4
MASKED_SCORE = -1e4  # the reference's score for masked keys


def linear_maps(maps: nn.Linear, count: int, x: Tensor) -> list[Tensor]:
    """The outputs of the `count` linear maps of x that the layer `maps` fuses, each computed as its own product."""
    weights, biases = maps.weight.chunk(count), maps.bias.chunk(count)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def normalize(x: Tensor) -> Tensor:
    """Divides x by its sum over the last dimension (equation 4)."""
    return x / (x.sum(-1, keepdim=True) + EPSILON)


def static_expansion(layer: StaticExpansion, x: Tensor, valid_mask: Tensor | None) -> Tensor:
    """Equations 2 to 9: (B, N, D) from x (B, N, D); valid_mask (B, N) is True at valid tokens, or None."""
    key, *values, gate = linear_maps(layer.in_proj, 4, x)
    scores = layer.queries @ key.transpose(1, 2) / math.sqrt(x.shape[-1])  # M (B, E, N)
    streams = []
    for value, signed in zip(values, (scores, -scores), strict=True):
        forward = F.relu(signed)
        if valid_mask is not None:
            forward = forward.masked_fill(~valid_mask[:, None], 0.0)
        expanded = normalize(forward) @ value + layer.biases  # (B, E, D)
        groups = [normalize(part) for part in F.relu(signed.transpose(1, 2)).split(layer.groups, -1)]
        streams.append(torch.cat(groups, -1) @ expanded / len(layer.groups))
    opened = torch.sigmoid(gate)
    return opened * streams[0] + (1 - opened) * streams[1]


def dynamic_expansion(layer: DynamicExpansion, x: Tensor, mask: Tensor) -> Tensor:
    """Equations 1 to 8: (B, T, D) from x (B, T, D); mask (B, T, T) is True where a position (row) may read another."""
    batch, _, width = x.shape
    condition, key, *values, gate = linear_maps(layer.in_proj, 5, x)
    queries = (condition[:, :, None] + layer.queries).view(batch, -1, width)  # (B, T * N_E, D)
    biases = (condition[:, :, None] + layer.biases).view(batch, -1, width)
    scores = queries @ key.transpose(1, 2) / math.sqrt(width)  # M (B, T * N_E, T)
    forward_mask = mask.repeat_interleave(layer.vectors, 1)
    # a position reads the vectors of the positions that it may read
    backward_mask = mask.repeat_interleave(layer.vectors, 2)
    streams = []
    for value, signed in zip(values, (scores, -scores), strict=True):
        forward = normalize(F.relu(signed).masked_fill(~forward_mask, 0.0))
        expanded = forward @ value + biases
        backward = normalize(F.relu(signed.transpose(1, 2)).masked_fill(~backward_mask, 0.0))
        streams.append(backward @ expanded)
    opened = torch.sigmoid(gate)
    return opened * streams[0] + (1 - opened) * streams[1]


def attention(query: Tensor, key: Tensor, value: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
    """Multi-head attention (B, T, D) of queries (B, T, D) to keys and values (B, N, D).

    mask (B, T or 1, N) is True where a query may attend to a key.
    """
    q, k, v = (x.view(x.shape[0], x.shape[1], num_heads, -1).transpose(1, 2) for x in (query, key, value))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], MASKED_SCORE)
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(query.shape)


def mix(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """The output (B, T, D) of dynamic expansion or self-attention under a mask (B, T, T)."""
    if isinstance(layer, DynamicExpansion):
        return dynamic_expansion(layer, x, mask)
    assert isinstance(layer, SelfAttention)
    query, key, value = linear_maps(layer.in_proj, 3, x)
    return layer.out_proj(attention(query, key, value, layer.num_heads, mask), x)


@dataclass
class PrefixCache:
    """Caches no computation: it has the tokens so far, and the encoder's output repeated for every beam."""

    images: int
    beams: int
    memory: Memory
    tokens: Tensor
    length: int = 0

    def expand_beams(self, beams: int) -> PrefixCache:
        rows = torch.arange(self.images, device=self.tokens.device).repeat_interleave(beams)
        self.beams, self.memory = beams, map_tensors(self.memory, lambda tensor: tensor[rows])
        return self.select(rows)

    def select(self, index: Tensor) -> PrefixCache:
        self.tokens = self.tokens.index_select(0, index)
        return self

    def keep_images(self, index: Tensor) -> PrefixCache:
        rows = (index[:, None] * self.beams + torch.arange(self.beams, device=index.device)).flatten()
        self.images, self.memory = len(index), map_tensors(self.memory, lambda tensor: tensor[rows])
        return self.select(rows)


class MaterializedModel(CaptionModel):
    """Computes an ExpansionNet (or baseline) in the long way, with the same parameters. Evaluation only."""

    def __init__(self, model: ExpansionNet) -> None:
        super().__init__(model.config, model.sizes)
        self.model = model

    def init_weights(self) -> None:
        self.model.init_weights()

    def encode(self, features: Features) -> Memory:
        model = self.model
        x = model.input(features.tokens)
        valid_mask = valid_tokens(features.lengths, x.shape[1])
        outputs = []
        for layer in model.encoder:
            normed = layer.mixer_norm(x)
            if isinstance(layer.mixer, StaticExpansion):
                x = x + static_expansion(layer.mixer, normed, valid_mask)
            else:
                is_valid = x.new_ones(x.shape[:2], dtype=torch.bool) if valid_mask is None else valid_mask
                mask = is_valid[:, None].expand(-1, x.shape[1], -1)
                if isinstance(layer.mixer, DynamicExpansion):
                    mask = mask & mask.transpose(1, 2)
                x = x + mix(layer.mixer, normed, mask)
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
            outputs.append(x)
        sums = model.encoder_sum
        return Memory(sums.norm(x + sums.map(torch.cat(outputs, -1))), features.lengths)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """Logits (B, T, V); `memory` has one row per caption, as in the reference."""
        model, (batch, length) = self.model, tokens.shape
        valid_mask = valid_tokens(memory.lengths, memory.states.shape[1])
        cross_mask = None if valid_mask is None else valid_mask[:, None]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
        y = model.token_embedding(tokens) * math.sqrt(model.config.d_model) + model.positions.weight[:length]
        outputs = []
        for layer in model.decoder:
            y = y + mix(layer.mixer, layer.mixer_norm(y), causal)
            cross, normed = layer.cross, layer.cross_norm(y)
            key, value = linear_maps(cross.key_value, 2, memory.states)
            y = y + cross.out_proj(attention(cross.query(normed), key, value, cross.num_heads, cross_mask), normed)
            y = y + layer.feed_forward(layer.feed_forward_norm(y))
            outputs.append(y)
        return model.lm_head(model.decoder_sum.norm(y + model.decoder_sum.map(torch.cat(outputs, -1))))

    def init_cache(self, memory: Memory, beams: int) -> PrefixCache:
        rows = torch.arange(memory.batch_size, device=memory.states.device).repeat_interleave(beams)
        by_row = map_tensors(memory, lambda tensor: tensor[rows])
        return PrefixCache(memory.batch_size, beams, by_row, tokens=rows.new_empty(len(rows), 0))

    def step(self, tokens: Tensor, cache: PrefixCache) -> tuple[Tensor, PrefixCache]:
        cache.tokens = torch.cat((cache.tokens, tokens[:, None]), 1)
        cache.length += 1
        return self.decode(cache.memory, cache.tokens)[:, -1], cache
