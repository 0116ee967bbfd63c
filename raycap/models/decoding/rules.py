"""Rules for the next word of captions in progress: which words are forbidden, and among which words is drawn.

The functions do not change their inputs, and no processor waits for a GPU, so that a CUDA graph can capture them.
Log-probabilities of allowed words are not changed: captions keep the log-probabilities of their model.

Shapes: R captions in progress of t tokens with SOS, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raycap.models.config import ModelSizes
from raycap.models.decoding.config import PLAIN, Decoding


@dataclass(frozen=True)
class ScoreRules:
    """The rules of `decoding` with their words in one vocabulary, and the ranking of captions.

    unk: the id of UNK; None if no word is UNK. open_endings: the ids of words that need another word after them.
    length_normalization: see `length_divisor`.
    """

    decoding: Decoding = PLAIN
    unk: int | None = None
    open_endings: tuple[int, ...] = ()
    length_normalization: bool | float = True

    def restriction(self, sizes: ModelSizes, max_length: int, device: torch.device) -> Restriction:
        return Restriction(self, sizes, max_length, device)


class Restriction:
    """The words that rules forbid in captions of at most `max_length` tokens with SOS and EOS."""

    def __init__(self, rules: ScoreRules, sizes: ModelSizes, max_length: int, device: torch.device) -> None:
        decoding = rules.decoding
        self.min_length, self.order, self.max_length = decoding.min_length, decoding.no_repeat_ngram, max_length
        self.is_eos = word_mask([sizes.eos], sizes.vocabulary_size, device)
        self.is_unk = self.is_open = None
        if decoding.suppress_unk and rules.unk is not None:
            self.is_unk = word_mask([rules.unk], sizes.vocabulary_size, device)
        if decoding.no_open_endings:
            self.is_open = word_mask(rules.open_endings, sizes.vocabulary_size, device)

    def __call__(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities (R, V) of the words after `tokens` (R, t), with -inf for forbidden words.

        EOS is allowed where every word would be forbidden.
        """
        length = tokens.shape[1]
        masks = []
        if self.is_unk is not None:
            masks.append(self.is_unk[None])
        if length + 1 < self.min_length:
            masks.append(self.is_eos[None])
        if self.order is not None and length >= self.order:
            masks.append(repeating_words(tokens, self.order, log_probs.shape[1]))
        if self.is_open is not None:
            masks.append(self.is_open[tokens[:, -1:]] & self.is_eos)
            if length + 1 == self.max_length:  # the next word is the last one
                masks.append(self.is_open[None])
        if not masks:
            return log_probs
        forbidden = functools.reduce(torch.logical_or, masks)
        forbidden = forbidden & ~(forbidden.all(-1, keepdim=True) & self.is_eos)
        return log_probs.masked_fill(forbidden, -torch.inf)


def word_mask(words: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """(V,) True for the words."""
    mask = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    for word in words:  # a list as an index would be copied to the GPU, which a CUDA graph cannot capture
        mask[word] = True
    return mask


def repeating_words(tokens: Tensor, order: int, vocabulary: int) -> Tensor:
    """(R, V) True for the words that would repeat an n-gram of `order` tokens in `tokens` (R, t), t >= order."""
    windows = tokens.unfold(1, order, 1)  # (R, t - order + 1, order)
    last = tokens[:, tokens.shape[1] - order + 1 :]
    repeats = (windows[:, :, :-1] == last[:, None]).all(-1)
    words = windows[:, :, -1].where(repeats, vocabulary)  # a column for windows that differ
    mask = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return mask.scatter(1, words, True)[:, :vocabulary]


def most_probable(log_probs: Tensor, count: int) -> Tensor:
    """The log-probabilities (R, V) with -inf for all but the `count` greatest; equals of the last one remain, too."""
    limit = log_probs.topk(min(count, log_probs.shape[1]), -1).values[:, -1:]
    return log_probs.masked_fill(log_probs < limit, -torch.inf)


def nucleus(log_probs: Tensor, share: float) -> Tensor:
    """The log-probabilities (R, V) with -inf outside of the fewest words that have this share of the probability.

    Words that are as probable as the last one of them remain, too. The rows need not be normalized.
    """
    ordered = log_probs.double().softmax(-1).sort(-1, descending=True)
    before = ordered.values.cumsum(-1) - ordered.values  # the probability of all more probable words
    last = (before < share).sum(-1, keepdim=True) - 1
    limit = log_probs.gather(1, ordered.indices.gather(1, last))
    return log_probs.masked_fill(log_probs < limit, -torch.inf)


def length_divisor(lengths: Tensor, normalization: bool | float) -> Tensor:
    """By what the sums of log-probabilities of captions with these lengths (with SOS and EOS) are divided to rank them.

    normalization: True for the lengths, so that means are ranked; False for 1; a number for the exponent alpha of the
    length penalty ((5 + n) / 6) ** alpha, where n counts the tokens without SOS (Wu et al. 2016, arXiv 1609.08144,
    equation 14).
    """
    if isinstance(normalization, bool):
        return lengths if normalization else torch.ones_like(lengths)
    return ((lengths + 4) / 6) ** normalization
