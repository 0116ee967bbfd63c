"""Which parts of an image each word of a caption depends on: weights of cross-attention, and attribution.

Attribution is how much each image token adds to the log-probability of each word, by integrated gradients
(Sundararajan, Taly and Yan 2017), as the Meshed-Memory paper uses them (section 4.6 and appendix A.3). The gradient of
log p(word | words before it, features) times the features is integrated along the line from all-zero features to the
image's features.

The exact values of a word add up, over all tokens and channels, to log p at the features minus log p at zeros. The
integral is a Gauss-Legendre sum over S points, which is exact for polynomials up to degree 2 S - 1. More points do not
remove every error, because gradients miss jumps of log p. ExpansionNet v2 has jumps (of 0.04 to 0.12 nats
in a trained model) where the last positive score of a row or group passes 0. The other systems are continuous.

Shapes: N image tokens, C feature width, T caption tokens with SOS, W = T - 1 predicted words (EOS is one of them),
R points on the line that are computed at a time.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Features, Memory, evaluating, map_tensors
from raycap.models.layers import CrossAttention, split_heads

STEPS = 64  # the number of points on the line
ROWS = 16  # the number of points that are computed at a time


@torch.no_grad()
def cross_attention(model: CaptionModel, memory: Memory, tokens: Tensor) -> Tensor:
    """Returns the cross-attention weights of each decoder layer and head, (layers, H, B*K, T - 1, N). Rows sum to 1.

    tokens: (B*K, T) with SOS, which are decoded in one teacher-forced pass. Row t has the weights with which the model
    predicts the word at t + 1. If a layer attends to several encoder levels, its weights are means over the levels.
    The weights are computed as softmax(q k / sqrt(d)), where d is the width of a head, from the recorded inputs of
    cross-attention, because the model's fused attention does not return them. Raises ValueError for a model without
    cross-attention.
    """
    layers = [module for module in model.modules() if isinstance(module, CrossAttention)]
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

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(record))
        model.decode(memory, tokens[:, :-1])
    return torch.stack(weights)


def integrated_gradients(model: CaptionModel, features: Features, tokens: Tensor, steps: int = STEPS) -> Tensor:
    """Attributes every word of one caption, tokens (T,) with SOS, to one image's features (1, N, C).

    Returns how much each image token adds to the log-probability of each word, (W, N) float64, in nats and summed over
    channels. The values are above 0 where a token makes the word more probable. steps: the number of points on the
    line. Each group of ROWS points takes one forward pass, and one backward pass per word, so that memory does not grow
    with the number of steps.
    """
    # inference mode is turned off, because the caller may have turned it on, and its tensors get no gradient
    with evaluating(model), torch.inference_mode(False):
        tokens, image = tokens.clone(), map_tensors(features, lambda tensor: tensor.detach().clone())
        words, end = len(tokens) - 1, image.tokens[0].to(next(model.parameters()).dtype)
        places, weights = (torch.from_numpy(part).to(end.device) / 2 for part in np.polynomial.legendre.leggauss(steps))
        points = (places + 0.5).to(end.dtype)  # from [-1, 1] to [0, 1]
        values = torch.zeros(words, len(end), dtype=torch.float64, device=end.device)
        for point, weight in zip(points.split(ROWS), weights.split(ROWS), strict=True):
            inputs = (point[:, None, None] * end).requires_grad_()
            with torch.enable_grad():
                # rows do not affect each other, so that the gradient of their sum has each row's own gradient
                log_probs = _log_probs(model, image, inputs, tokens).sum(0)
            for word in range(words):
                (gradient,) = torch.autograd.grad(log_probs[word], inputs, retain_graph=word + 1 < words)
                values[word] += weight @ (gradient * end).sum(2, dtype=torch.float64)
        return values


def _log_probs(model: CaptionModel, image: Features, features: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities (R, W) of the caption's words by a teacher-forced pass over features (R, N, C).

    image: the lengths and boxes of one image, which hold for all R rows.
    """
    rows = features.shape[0]
    expanded = map_tensors(image, lambda tensor: tensor.expand(rows, *tensor.shape[1:]))
    logits = model(replace(expanded, tokens=features), tokens[:-1].expand(rows, -1))
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return log_probs.gather(2, tokens[1:].expand(rows, -1)[:, :, None])[:, :, 0]


def shares(values: Tensor) -> Tensor:
    """Returns each word's values (W, N) divided by the absolute value of their sum, unless the sum is 0.

    The paper takes means over channels instead of sums, which gives the same shares. The sum's absolute value is used,
    so that values keep their signs if the whole image makes a word less probable.
    """
    total = values.sum(1, keepdim=True).abs()
    return values / torch.where(total > 0, total, 1.0)
