"""Where a caption looks: the weights of cross-attention for each of its words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Memory, evaluating, hooked
from raycap.models.layers import CrossAttention, split_heads


@torch.no_grad()
def cross_attention(model: CaptionModel, memory: Memory, tokens: Tensor) -> Tensor:
    """The weights softmax(q k / sqrt(d)) of each decoder layer and head, (layers, H, B*K, T - 1, N); rows sum to 1.

    They are means over the encoder levels that a meshed decoder layer attends to; d is the width of a head. `tokens`
    (B*K, T) start with SOS; row t has the weights with which the model predicts the word at t + 1. This takes one
    teacher-forced pass. The model's fused attention does not return its weights, so that they are computed here from
    the inputs of cross-attention.
    Raises ValueError for a model without cross-attention.
    """
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, CrossAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no cross-attention to show")
    weights: list[Tensor] = []

    def record(layer: Any, inputs: tuple[Any, ...]) -> None:
        x, key, _, bias = inputs  # (B*K, T, D), (B, H, N, d), the values, and (B, 1, 1, N) or None
        query = split_heads(layer.query(x).view(key.shape[0], -1, x.shape[-1]), layer.num_heads)  # (B, H, K*T, d)
        if key.ndim == 5:  # (B, levels, H, N, d): each level is treated as further heads
            query, key = query.repeat(1, key.shape[1], 1, 1), key.flatten(1, 2)
        scores = torch.matmul(query, key.mT).float() / math.sqrt(query.shape[-1])
        if bias is not None:
            scores = scores + bias.float()
        by_head = scores.softmax(-1).unflatten(1, (-1, layer.num_heads)).mean(1)  # (B, H, K*T, N)
        rows = by_head.transpose(1, 2).reshape(*x.shape[:2], layer.num_heads, -1)
        weights.append(model.predicting(rows).movedim(2, 0))

    with evaluating(model), hooked(layers, record):
        model.decode(memory, tokens[:, :-1])
    return torch.stack(weights)
