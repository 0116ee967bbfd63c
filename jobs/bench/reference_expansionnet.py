"""ExpansionNet v2 a second time, as its equations read: what the fast form is tested and timed against.

The expanded sequences exist in memory, the dynamic queries `c_s + e_n` too, every linear map is its own product, and
decoding runs the whole prefix again at each step for every beam, cross-attention keys included, as the reference does.
Evaluation only; nothing in training or captioning uses it.

Shapes: B sequences (images, or captions with their image repeated), N image tokens, T caption tokens, E expanded
vectors, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Cache, CaptionModel, Features, Memory
from models.expansion import DynamicExpansion, StaticExpansion
from models.expansionnet import ExpansionNet
from models.layers import CrossAttention, SelfAttention

EPSILON = 1e-9
MASKED_SCORE = -1e4


def linear_maps(maps: nn.Linear, count: int, x: Tensor) -> list[Tensor]:
    """The fused maps of a layer one by one."""
    weights, biases = maps.weight.chunk(count), maps.bias.chunk(count)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def normalize(x: Tensor) -> Tensor:
    """Equation 4, over the last dimension."""
    return x / (x.sum(-1, keepdim=True) + EPSILON)


def static_expansion(layer: StaticExpansion, x: Tensor, valid_mask: Tensor | None) -> Tensor:
    """x (B, N, D), valid_mask (B, N) or None -> (B, N, D). Equations 2 to 9."""
    key, value_1, value_2, gate = linear_maps(layer.in_proj, 4, x)
    m = layer.queries @ key.transpose(1, 2) / math.sqrt(x.shape[-1])  # (B, E, N)
    results = []
    for value, signed in ((value_1, m), (value_2, -m)):
        forward = F.relu(signed)
        if valid_mask is not None:
            forward = forward.masked_fill(~valid_mask[:, None], 0.0)
        expanded = normalize(forward) @ value + layer.biases  # (B, E, D)
        groups = [normalize(part) for part in F.relu(signed.transpose(1, 2)).split(layer.groups, -1)]
        results.append(torch.cat(groups, -1) @ expanded / len(layer.groups))
    opened = torch.sigmoid(gate)
    return opened * results[0] + (1 - opened) * results[1]


def dynamic_expansion(layer: DynamicExpansion, x: Tensor, mask: Tensor) -> Tensor:
    """x (B, T, D), mask (B, T, T) True where position s sees t -> (B, T, D). Equations 1 to 8."""
    batch, _, width = x.shape
    condition, key, value_1, value_2, gate = linear_maps(layer.in_proj, 5, x)
    queries = (condition[:, :, None] + layer.queries).view(batch, -1, width)  # (B, T * N_E, D)
    biases = (condition[:, :, None] + layer.biases).view(batch, -1, width)
    m = queries @ key.transpose(1, 2) / math.sqrt(width)  # (B, T * N_E, T)
    forward_mask = mask.repeat_interleave(layer.vectors, 1)
    backward_mask = mask.repeat_interleave(layer.vectors, 2)  # t reached by s: only earlier positions, as in forward
    results = []
    for value, signed in ((value_1, m), (value_2, -m)):
        forward = normalize(F.relu(signed).masked_fill(~forward_mask, 0.0))
        expanded = forward @ value + biases
        backward = normalize(F.relu(signed.transpose(1, 2)).masked_fill(~backward_mask, 0.0))
        results.append(backward @ expanded)
    opened = torch.sigmoid(gate)
    return opened * results[0] + (1 - opened) * results[1]


def attention(query: Tensor, key: Tensor, value: Tensor, num_heads: int, mask: Tensor | None) -> Tensor:
    """(B, T, D) against (B, N, D); mask (B, T or 1, N) True where a query sees a key."""
    q, k, v = (x.view(x.shape[0], x.shape[1], num_heads, -1).transpose(1, 2) for x in (query, key, value))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], MASKED_SCORE)
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(query.shape)


def cross_attention(layer: CrossAttention, x: Tensor, states: Tensor, valid_mask: Tensor | None) -> Tensor:
    key, value = linear_maps(layer.key_value, 2, states)
    mask = None if valid_mask is None else valid_mask[:, None]
    return layer.out_proj(attention(layer.query(x), key, value, layer.num_heads, mask), x)


def self_attention(layer: SelfAttention, x: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = linear_maps(layer.in_proj, 3, x)
    return layer.out_proj(attention(query, key, value, layer.num_heads, mask), x)


def mix(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Dynamic expansion or attention under a mask (B, T, T)."""
    if isinstance(layer, DynamicExpansion):
        return dynamic_expansion(layer, x, mask)
    assert isinstance(layer, SelfAttention)
    return self_attention(layer, x, mask)


@dataclass
class PrefixCache(Cache):
    """No cache: the tokens so far, and the encoder's output repeated for every beam."""

    images: int
    beams: int
    memory: Memory
    tokens: Tensor
    length: int = 0

    def expand_beams(self, beams: int) -> PrefixCache:
        rows = torch.arange(self.images, device=self.tokens.device).repeat_interleave(beams)
        if self.beams != 1:
            raise ValueError(f"each image has {self.beams} beams already; only one can become {beams}")
        self.beams, self.memory = beams, self.memory.select(rows)
        return self.select(rows)

    def select(self, index: Tensor) -> PrefixCache:
        self.tokens = self.tokens.index_select(0, index)
        return self

    def keep_images(self, index: Tensor) -> PrefixCache:
        rows = (index[:, None] * self.beams + torch.arange(self.beams, device=index.device)).flatten()
        self.images, self.memory = len(index), self.memory.select(rows)
        return self.select(rows)


class MaterializedModel(CaptionModel):
    """An ExpansionNet (or baseline) with the same parameters, computed the long way. Evaluation only."""

    def __init__(self, model: ExpansionNet) -> None:
        super().__init__(model.config, model.sizes)
        self.model = model

    def init_weights(self) -> None:
        self.model.init_weights()

    def encode(self, features: Features) -> Memory:
        model, lengths = self.model, features.lengths
        x = model.input(features.tokens)
        valid_mask = None
        if lengths is not None:
            valid_mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        outputs = []
        for layer in model.encoder:
            normed = layer.mixer_norm(x)
            if isinstance(layer.mixer, StaticExpansion):
                mixed = static_expansion(layer.mixer, normed, valid_mask)
            else:
                sees = x.new_ones(x.shape[:2], dtype=torch.bool) if valid_mask is None else valid_mask
                mask = sees[:, None].expand(-1, x.shape[1], -1)
                if isinstance(layer.mixer, DynamicExpansion):
                    mask = mask & mask.transpose(1, 2)
                mixed = mix(layer.mixer, normed, mask)
            x = x + mixed
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
            outputs.append(x)
        return Memory(model.encoder_sum.norm(x + model.encoder_sum.map(torch.cat(outputs, -1))), lengths)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """One row of memory for each caption, as the reference has it."""
        model, states = self.model, memory.states
        valid_mask = None
        if memory.lengths is not None:
            valid_mask = torch.arange(states.shape[1], device=states.device) < memory.lengths[:, None]
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        causal = causal.expand(tokens.shape[0], -1, -1)
        y = model.token_embedding(tokens) * math.sqrt(model.config.d_model) + model.positions.weight[:length]
        outputs = []
        for layer in model.decoder:
            y = y + mix(layer.mixer, layer.mixer_norm(y), causal)
            y = y + cross_attention(layer.cross, layer.cross_norm(y), states, valid_mask)
            y = y + layer.feed_forward(layer.feed_forward_norm(y))
            outputs.append(y)
        return model.lm_head(model.decoder_sum.norm(y + model.decoder_sum.map(torch.cat(outputs, -1))))

    def init_cache(self, memory: Memory, beams: int) -> PrefixCache:
        rows = torch.arange(memory.batch_size, device=memory.states.device).repeat_interleave(beams)
        tokens = rows.new_empty(len(rows), 0)
        return PrefixCache(memory.batch_size, beams, memory.select(rows), tokens)

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, PrefixCache]:
        assert isinstance(cache, PrefixCache)
        cache.tokens = torch.cat((cache.tokens, tokens[:, None]), 1)
        cache.length += 1
        return self.decode(cache.memory, cache.tokens)[:, -1], cache
