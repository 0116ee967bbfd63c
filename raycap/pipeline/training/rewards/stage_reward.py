"""The reward of a stage of SCST: the weighted sum of rewards that `scst.reward` names.

Rewards other than CIDEr-D are computed from words: those on which the language's metrics are computed
(`scores.metric_words`), whatever the model's tokens are. EOS is no word there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.evaluation.scores.metrics import CaptionWords
from raycap.pipeline.evaluation.scores.ngrams import bleu, rouge_l
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards.cider_d import CiderDReward, References

MAX_IMAGES = 100_000  # whose references are kept split by one worker, 100 MB

# Gives N captions their values, float64 (N,). They must not depend on the other captions.
WordReward = Callable[[CaptionWords], np.ndarray]
CIDER_D = "ciderd"  # the name of `CiderDReward`, which reads token ids, so that its EOS can count as a word


@dataclass(frozen=True)
class Bleu:
    """BLEU-n of each caption, from 0 to 1, with the references' closest length.

    It is the value per image of the metric BLEU-n, whose only smoothing is 1e-15 added to each number of matches, and
    1e-9 to each number of n-grams (`evaluation.scores.ngrams.bleu`). A caption of n words or more of which no n-gram
    matches has almost 0: for n = 4 below 0.0002.
    """

    n: int

    def __call__(self, captions: CaptionWords) -> np.ndarray:
        return bleu(captions.corpus)[1][self.n - 1]


class RougeL:
    """ROUGE-L of each caption, from 0 to 1: the value per image of the metric."""

    def __call__(self, captions: CaptionWords) -> np.ndarray:
        return rouge_l(captions.predictions, captions.references)


class Length:
    """The number of words of each caption. A negative weight makes captions shorter."""

    def __call__(self, captions: CaptionWords) -> np.ndarray:
        return np.array([len(words) for words in captions.predictions], np.float64)


class Repetition:
    """How many pairs of neighboring words of each caption have occurred in it before.

    "a dog and a dog" has 1, "dog dog dog dog" has 2. A negative weight makes captions repeat less.
    """

    def __call__(self, captions: CaptionWords) -> np.ndarray:
        pairs = [list(pairwise(words)) for words in captions.predictions]
        return np.array([len(each) - len(set(each)) for each in pairs], np.float64)


class SampledWords:
    """Splits sampled token ids and the references of their images into words.

    references: raw captions, which stay in Arrow's memory. language: of the captions. The work is done on the host and
    takes 0.1 to 0.3 ms per caption: once per distinct sampled caption of a call, and once per image for its references.
    Their words are kept for MAX_IMAGES images (about 1 kB each with five references); of more, they are split again in
    each epoch.
    """

    def __init__(self, references: References, vocabulary: Vocabulary, language: str) -> None:
        self._texts, self._vocabulary, self._language = references, vocabulary, language
        self._references: dict[int, list[list[str]]] = {}
        self._interned: dict[str, str] = {}  # one object per word, because references repeat few words

    def __call__(self, tokens: Tensor, indices: Tensor) -> tuple[CaptionWords, Tensor]:
        """The distinct pairs of a caption and an image, and the number (R,), on the host, of each row's pair.

        tokens, indices: see `CiderDReward`.
        """
        rows = [tuple(row) for row in tokens.tolist()]
        pairs = list(zip(rows, indices.tolist(), strict=True))
        words = {row: self._split(self._vocabulary.decode(row)) for row in dict.fromkeys(rows)}
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        predictions = [words[row] for row, _ in numbers]
        captions = CaptionWords(predictions, [self._of_image(index) for _, index in numbers])
        return captions, torch.tensor([numbers[pair] for pair in pairs])

    def _of_image(self, index: int) -> list[list[str]]:
        """The words of each reference of an image."""
        if index not in self._references:
            if len(self._references) >= MAX_IMAGES:
                self._references.clear()
            self._references[index] = [self._split(text) for text in self._texts[index]]
        return self._references[index]

    def _split(self, caption: str) -> list[str]:
        return [self._interned.setdefault(word, word) for word in metric_words(caption, self._language)]


WORD_REWARDS: dict[str, WordReward] = {
    "bleu1": Bleu(1),
    "bleu2": Bleu(2),
    "bleu3": Bleu(3),
    "bleu4": Bleu(4),
    "rouge_l": RougeL(),
    "length": Length(),
    "repetition": Repetition(),
}
REWARDS = (CIDER_D, *WORD_REWARDS)


class WeightedReward:
    """The sum of weights times rewards of `REWARDS`.

    Captions are split into words only if a reward needs them. This reads the token ids from the device and takes the
    time that `SampledWords` states; the rewards of `WORD_REWARDS` then take less than 0.1 ms per caption.

    references, language: see `SampledWords`; cider_d has the same images in the same order.
    """

    def __init__(
        self,
        weights: Mapping[Any, float],
        cider_d: CiderDReward,
        references: References,
        vocabulary: Vocabulary,
        language: str,
    ) -> None:
        self.weights = dict(sorted(weights.items()))  # so that rounding does not depend on the order in a file
        self.cider_d, self._split = cider_d, None
        if weights.keys() & WORD_REWARDS.keys():
            self._split = SampledWords(references, vocabulary, language)

    def __call__(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum (R,) for R captions, and each reward's values (R,) without its weight, by name; all float64.

        tokens, indices: see `CiderDReward`.
        """
        values = {}
        if CIDER_D in self.weights:
            values[CIDER_D] = self.cider_d(tokens, indices)
        if self._split is not None:
            captions, numbers = self._split(tokens, indices)
            for name in self.weights.keys() & WORD_REWARDS.keys():
                values[name] = torch.from_numpy(WORD_REWARDS[name](captions))[numbers].to(tokens.device)
        parts = [weight * values[name] for name, weight in self.weights.items()]
        return torch.stack(parts).sum(0), values
