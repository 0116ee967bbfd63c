"""The normalized fine-grained alignment score of Ada-ClustFormer's paper (section 4.1): do words and patches agree?

G = D_v D_t^T are the products of the encoder's output and the last decoder states of the caption's words. Word t
agrees when the image token that it is nearest to, v = argmax G[., t], is nearest to it among the words: argmax G[v, .]
is t. The score of a caption is the share of its words that agree. The paper counts coincidences of the two maxima and
normalizes "this number" without a formula; here it is divided by the number of words. The paper
leaves two things open: a word's state here is that after the word itself, not the one that predicted it; and SOS, EOS,
PAD and padded image tokens do not count.

It is defined for any model whose image tokens and words have one width; of a model that keeps every encoder level, the
last. Scores of different widths or data are comparable only with care: a random model does not have 0.

Shapes: B images, N image tokens, T caption tokens with SOS, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.base import CaptionModel, Memory, valid_tokens


def aligned_words(image: Tensor, words: Tensor, valid_mask: Tensor | None, counted: Tensor) -> Tensor:
    """(B, T) True for the words that agree.

    image (B, N, D), words (B, T, D), valid_mask (B, N) or None, counted (B, T) True for the words that count.
    """
    products = image @ words.mT  # (B, N, T)
    if valid_mask is not None:
        products = products.masked_fill(~valid_mask[:, :, None], -torch.inf)
    nearest = products.argmax(1)  # (B, T) the image token of each word
    back = products.masked_fill(~counted[:, None], -torch.inf)
    back = back.gather(1, nearest[:, :, None].expand(-1, -1, words.shape[1])).argmax(2)
    return (back == torch.arange(words.shape[1], device=words.device)) & counted


@torch.no_grad()
def alignment_scores(model: CaptionModel, memory: Memory, tokens: Tensor) -> Tensor:
    """(B,) float32: the score of each image's one caption, tokens (B, T) with SOS; NaN for a caption without words.

    It costs one teacher-forced pass. The last word of a caption that fills the positional table has no state and is
    left out.
    """
    tokens = tokens[:, : model.sizes.max_positions]
    sizes, states = model.sizes, []
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))  # type: ignore[union-attr]
    training = model.training
    model.eval()
    try:
        model.decode(memory, tokens)
    finally:
        model.train(training)
        hook.remove()
    ended = (tokens == sizes.eos).cumsum(1) > 0
    counted = ~ended & (tokens != sizes.sos) & (tokens != sizes.pad)
    image = memory.states[:, -1] if memory.states.ndim == 4 else memory.states
    agree = aligned_words(image.float(), states[0].float(), valid_tokens(memory.lengths, image.shape[1]), counted)
    return agree.sum(1) / counted.sum(1)  # 0 / 0 is NaN
