"""Layers that the captioners share: dropout, feed-forward, multi-head attention.

Shapes: B images, N image tokens, K captions an image, T caption tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED_SCORE = -1e4  # the reference's value for masked attention scores (specs item 4); finite also in float16


class Dropout(nn.Module):
    """Dropout with a probability that can be changed after construction (`set_dropout`)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def active(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p) if self.active else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


def set_dropout(module: nn.Module, p: float) -> None:
    """Sets the probability of every dropout of a captioner (0.3 in cross entropy, 0.1 in SCST in the paper's recipe).

    Raises ValueError for a probability outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout is {p}; it must be at least 0 and below 1")
    for child in module.modules():
        if isinstance(child, Dropout):
            child.p = p


def xavier_blocks_(weight: Tensor, blocks: int = 1) -> None:
    """Xavier uniform for each of `blocks` equal row blocks of a weight that fuses several maps of one input."""
    for block in weight.chunk(blocks):
        nn.init.xavier_uniform_(block)


def residual_dropouts(count: int, p: float) -> Iterator[Dropout]:
    return (Dropout(p) for _ in range(count))


class FeedForward(nn.Module):
    """Linear, ReLU, dropout, Linear."""

    def __init__(self, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)

    def init_weights(self) -> None:
        xavier_blocks_(self.inner.weight)
        xavier_blocks_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(F.relu(self.inner(x))))


def padding_bias(real: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, 1, 1, N) to add to attention scores: 0 at real tokens, -1e4 at padding. None when there is no padding."""
    if real is None:
        return None
    return torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, MASKED_SCORE)[:, None, None]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) -> (B, H, T, D / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D / H) -> (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    """Multi-head attention from caption tokens to image tokens. No dropout on the weights, as in the reference."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def init_weights(self) -> None:
        xavier_blocks_(self.query.weight)
        xavier_blocks_(self.key_value.weight, 2)
        xavier_blocks_(self.output.weight)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, N, D / H) of image tokens (B, N, D): once an image."""
        key, value = self.key_value(states).chunk(2, -1)
        return split_heads(key, self.heads), split_heads(value, self.heads)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """x (B*K, T, D) against keys and values of B images; bias (B, 1, 1, N) or None."""
        # the K captions of an image become one longer query sequence, so that its keys are read once
        rows, length, width = x.shape
        query = split_heads(self.query(x).view(key.shape[0], -1, width), self.heads)
        if bias is not None:
            bias = bias.to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.output(merge_heads(mixed).view(rows, length, width))


class SelfAttention(nn.Module):
    """Multi-head self-attention, causal or bidirectional: the baseline's mixer. No public code has it (specs item 13)."""

    def __init__(self, d_model: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.maps = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def init_weights(self) -> None:
        xavier_blocks_(self.maps.weight, 3)
        xavier_blocks_(self.output.weight)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x (B, L, D); real (B, L) True at real tokens, or None."""
        query, key, value = (split_heads(part, self.heads) for part in self.maps(x).chunk(3, -1))
        bias = padding_bias(real, query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=self.causal)
        return self.output(merge_heads(mixed))

    def start(self) -> dict[str, Tensor]:
        return {}

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """x (R, D): the next token of R rows."""
        query, key, value = (split_heads(part, self.heads) for part in self.maps(x)[:, None].chunk(3, -1))
        if cache:
            key = torch.cat((cache["key"], key), 2)
            value = torch.cat((cache["value"], value), 2)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(merge_heads(mixed))[:, 0], {"key": key, "value": value}
