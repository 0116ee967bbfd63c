"""The energy of captions: low where a model has much evidence for some word, high on images unlike its training images.

A word's energy is minus the log-sum-exp of its logits (Liu et al. 2020, arXiv 2010.03759, eq. 4 with temperature 1).
Log-probabilities do not have it, because softmax removes the logits' common level: a model that has never seen a red
star can be as sure of a wrong word as it is elsewhere, with lower logits. The level means nothing by itself; it is
compared with that on other images of the same model.

Shapes: B images, T caption tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycap.models.base import CaptionModel, Memory, evaluating


@torch.no_grad()
def caption_energies(model: CaptionModel, memory: Memory, tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The mean energy (B,) float32 of the first `count` tokens of each caption; float64 for a float64 model.

    tokens: one caption per image, (B, T) with SOS. lengths: (B,) with SOS and EOS, 2 or more. count: without SOS; of a
    shorter caption, all tokens count. This takes one teacher-forced pass over these tokens.
    """
    counts = (lengths - 1).clamp(max=count)
    with evaluating(model):
        logits = model.decode(memory, tokens[:, :-1][:, :count])
    energies = -logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
    counted = torch.arange(energies.shape[1], device=energies.device) < counts[:, None]
    return energies.masked_fill(~counted, 0.0).sum(1) / counts
