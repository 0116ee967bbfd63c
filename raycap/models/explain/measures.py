"""Two measures of a caption that take one teacher-forced pass: its alignment with the image, and its energy.

The alignment is the normalized fine-grained score of Ada-ClustFormer's paper (section 4.1): do words and patches agree?
G = D_v D_t^T are the products of the encoder's output and the last decoder states of the caption's words. The image
token nearest to word t is v = argmax G[., t]. Word t agrees when it is in turn the word nearest to v: argmax G[v, .] is
t. The score of a caption is the share of its words that agree.

The paper leaves three things open. It normalizes the number of words that agree without a formula; here it is divided
by the number of words. The state of a word is the one after the word was read, not the one that predicted it. SOS, EOS,
PAD and padded image tokens do not count. The score is defined for any model whose image tokens and words have the same
width. Where a model returns every encoder level, the last one is used. Compare scores of different widths or data with
care: a random model scores above 0.

The energy is low where a model has much evidence for some word, and high on images unlike its training images. A word's
energy is minus the log-sum-exp of its logits (Liu et al. 2020, arXiv 2010.03759, eq. 4 with temperature 1).
Log-probabilities do not have it, because softmax removes the logits' common level: a model that has never seen a red
star can be as sure of a wrong word as it is elsewhere, with lower logits. The level means nothing by itself; it is
compared with that on other images of the same model.

Shapes: B images, N image tokens, T caption tokens with SOS, D width, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from raycap.models.base import CaptionModel, Memory, evaluating, hooked, valid_tokens


def aligned_words(image: Tensor, words: Tensor, valid_mask: Tensor | None, counted: Tensor) -> Tensor:
    """Whether each word agrees, (B, T), from image tokens (B, N, D) and word states (B, T, D).

    `valid_mask` (B, N) is True at image tokens that are not padding, `counted` (B, T) at tokens that are words.
    """
    products = image @ words.mT  # (B, N, T)
    if valid_mask is not None:
        products = products.masked_fill(~valid_mask[:, :, None], -torch.inf)
    nearest_token = products.argmax(1)  # (B, T) the image token of each word
    index = nearest_token[:, :, None].expand(-1, -1, words.shape[1])
    counted_products = products.masked_fill(~counted[:, None], -torch.inf)
    nearest_word = counted_products.gather(1, index).argmax(2)  # (B, T) the word nearest to that image token
    return (nearest_word == torch.arange(words.shape[1], device=words.device)) & counted


@torch.no_grad()
def alignment_scores(model: CaptionModel, memory: Memory, tokens: Tensor) -> Tensor:
    """The scores (B,) float32 of one caption per image, tokens (B, T) with SOS; NaN for a caption without words.

    This takes one teacher-forced pass. When a caption fills the positional table, its last word has no state and is
    left out.
    """
    tokens = tokens[:, : model.sizes.max_positions]
    sizes = model.sizes
    states: list[Tensor] = []  # the input of the output layer, which is the last decoder states (B, T, D)
    with evaluating(model), hooked([cast(nn.Module, model.lm_head)], lambda _, inputs: states.append(inputs[0])):
        model.decode(memory, tokens)
    ended = (tokens == sizes.eos).cumsum(1) > 0  # True at EOS and after it
    counted = ~ended & (tokens != sizes.sos) & (tokens != sizes.pad)
    image = memory.states[:, -1] if memory.states.ndim == 4 else memory.states
    agree = aligned_words(image.float(), states[0].float(), valid_tokens(memory.lengths, image.shape[1]), counted)
    return agree.sum(1) / counted.sum(1)  # 0 / 0 is NaN


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
