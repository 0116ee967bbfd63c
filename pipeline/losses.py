"""Losses, normalized by the global count so that one process and many give the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, pad: int, smoothing: float) -> Tensor:
    """Sum over real targets of the label-smoothed loss, in the reference's form.

    The target keeps 1 - smoothing and the other V - 1 classes share `smoothing`; the loss is the Kullback-Leibler
    divergence from that distribution (its entropy subtracted: 0 at a perfect prediction). Divide by the number of
    target tokens of the whole batch. logits (..., V) of any float dtype, targets (...) int64.
    """
    real = targets != pad
    logits, targets = logits[real].float() if logits.dtype != torch.float64 else logits[real], targets[real]
    if smoothing == 0:
        return F.cross_entropy(logits, targets, reduction="sum")
    log_probs = logits.log_softmax(-1)
    rest = smoothing / (logits.shape[-1] - 1)
    hit = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    cross = (1 - smoothing - rest) * hit + rest * log_probs.sum(-1)
    entropy = (1 - smoothing) * _log(1 - smoothing) + smoothing * _log(rest)
    return entropy * len(targets) - cross.sum()


def caption_log_probs(logits: Tensor, tokens: Tensor, pad: int) -> Tensor:
    """Sum of log-probabilities of each caption's tokens after SOS, EOS included, PAD left out.

    logits (R, T, V) for inputs tokens[:, :-1] of tokens (R, T + 1); returns (R,) in float32 or float64.
    """
    targets = tokens[:, 1:]
    logits = logits.float() if logits.dtype != torch.float64 else logits
    chosen = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return (chosen * (targets != pad)).sum(-1)


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())
