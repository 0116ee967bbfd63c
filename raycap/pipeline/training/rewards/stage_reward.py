"""The reward of a stage of SCST: the weighted sum of rewards that `scst.reward` names.

Rewards other than CIDEr-D are computed from the words of the language's metrics (`scores.metric_words`), whatever the
model's tokens are. EOS does not count as a word there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.scores.metrics import CaptionWords
from raycap.pipeline.evaluation.scores.ngrams import bleu, rouge_l
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards.cider_d import CiderDReward

MAX_IMAGES = 100_000  # A worker keeps the words of the references of this many images, which takes 100 MB.
CIDER_D = "ciderd"  # the name of `CiderDReward`. It reads token ids, so that EOS can count as a word.


def length(captions: CaptionWords) -> np.ndarray:
    """The number of words of each caption. A negative weight makes captions shorter."""
    return np.array([len(words) for words in captions.predictions], np.float64)


def repetition(captions: CaptionWords) -> np.ndarray:
    """How many pairs of neighboring words of each caption repeat an earlier pair of it.

    "a dog and a dog" has 1, "dog dog dog dog" has 2. A negative weight makes captions repeat less.
    """
    pairs = [list(pairwise(words)) for words in captions.predictions]
    return np.array([len(each) - len(set(each)) for each in pairs], np.float64)


# Each function gives N captions their values, float64 (N,), where the value of a caption does not depend on the others.
# BLEU-n and ROUGE-L are the metrics' values per image, from 0 to 1. BLEU is hardly smoothed (1e-15 matches and 1e-9
# n-grams), so a caption without a matching 4-gram has a BLEU-4 below 0.0002.
WORD_REWARDS: dict[str, Callable[[CaptionWords], np.ndarray]] = {
    "bleu1": lambda captions: bleu(captions.corpus)[1][0],
    "bleu2": lambda captions: bleu(captions.corpus)[1][1],
    "bleu3": lambda captions: bleu(captions.corpus)[1][2],
    "bleu4": lambda captions: bleu(captions.corpus)[1][3],
    "rouge_l": lambda captions: rouge_l(captions.predictions, captions.references),
    "length": length,
    "repetition": repetition,
}
REWARDS = (CIDER_D, *WORD_REWARDS)


class WeightedReward:
    """The sum of weights times rewards of `REWARDS`.

    If a reward needs words, sampled captions and the references of their images are split on the host. This takes 0.1
    to 0.3 ms per distinct sampled caption of a call, and per reference of a new image. The words of references are kept
    for MAX_IMAGES images.
    """

    def __init__(
        self,
        weights: Mapping[Any, float],
        cider_d: CiderDReward,
        captions_of: Callable[[int], Sequence[str]],
        vocabulary: Vocabulary,
        language: str,
    ) -> None:
        """captions_of: gives the raw captions of the image with a number. cider_d: of the same images in this order."""
        self.weights = dict(sorted(weights.items()))  # The order in a file must not change the rounding of the sum.
        self.cider_d, self._vocabulary, self._language = cider_d, vocabulary, language
        # It does not refer to `self`: a cycle would keep the index of a finished stage in a GPU's memory.
        self._of_image = lru_cache(MAX_IMAGES)(lambda index: [_split(text, language) for text in captions_of(index)])

    def __call__(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum (R,) for R captions, and by name the values (R,) of each reward before its weight; all float64.

        tokens, indices: see `CiderDReward`.
        """
        values = {}
        if CIDER_D in self.weights:
            values[CIDER_D] = self.cider_d(tokens, indices)
        if names := self.weights.keys() & WORD_REWARDS.keys():
            captions, numbers = self._words(tokens, indices)
            for name in names:
                values[name] = torch.from_numpy(WORD_REWARDS[name](captions))[numbers].to(tokens.device)
        parts = [weight * values[name] for name, weight in self.weights.items()]
        return torch.stack(parts).sum(0), values

    def _words(self, tokens: Tensor, indices: Tensor) -> tuple[CaptionWords, Tensor]:
        """The distinct pairs of a caption and an image, and for each row the number of its pair (R,), on the host."""
        rows = [tuple(row) for row in tokens.tolist()]
        pairs = list(zip(rows, indices.tolist(), strict=True))
        words = {row: _split(self._vocabulary.decode(row), self._language) for row in dict.fromkeys(rows)}
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        predictions = [words[row] for row, _ in numbers]
        captions = CaptionWords(predictions, [self._of_image(index) for _, index in numbers])
        return captions, torch.tensor([numbers[pair] for pair in pairs])


def _split(caption: str, language: str) -> list[str]:
    """The words of a caption. Equal words are one object, because references repeat few words."""
    return list(map(sys.intern, metric_words(caption, language)))
