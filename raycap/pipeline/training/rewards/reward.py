"""The rewards of SCST: CIDEr-D of token ids, rewards of words, and the weighted sum that `scst.reward` names.

CIDEr-D is also the score of validation. The other rewards are computed from the words of the language's metrics
(`scores.metric_words`), whatever the model's tokens are. For these rewards, EOS does not count as a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.data.vocabulary import EOS, Vocabulary
from raycap.pipeline.evaluation.scores.metrics import CaptionWords
from raycap.pipeline.evaluation.scores.ngrams import bleu, rouge_l
from raycap.pipeline.evaluation.scores.words import metric_words
from raycap.pipeline.training.rewards.cider import build_index

MAX_IMAGES = 100_000  # A worker keeps the words of the references of this many images, which takes 100 MB.
CIDER_D = "ciderd"  # the name of `CiderDReward`, which reads token ids, so that EOS can count as a word


class CiderDReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against reference captions, which the vocabulary tokenizes.

    References keep all their words, including those outside the model's vocabulary. If the vocabulary has subwords,
    sampled captions and references are split into the words of the language's metrics. The host splits each distinct
    caption of a call once, in 0.1 to 0.3 ms per caption.

    eos: if true, EOS counts as a word at the end of every reference and of every caption that ended. A caption that was
    cut off at the length limit then scores lower.
    caption_documents: if true, the document frequencies count captions instead of images.
    device: of the captions to score and of the index. `build_index` states the size of the index.
    """

    def __init__(
        self,
        references: Iterable[Sequence[str]],
        vocabulary: Vocabulary,
        *,
        eos: bool,
        caption_documents: bool = False,
        device: torch.device | str = "cpu",
        language: str = ENGLISH,
    ) -> None:
        """references: the captions of each image, as texts that `Vocabulary.tokenize` accepts."""
        self.eos, self.eos_id = eos, vocabulary.eos
        self._vocabulary, self._language = vocabulary, language
        # Words have the ids of the vocabulary. If the vocabulary has subwords, the references' words get new ids.
        ids = dict(vocabulary.ids) if vocabulary.subwords is None else {EOS: 0}

        def encoded() -> Iterator[list[list[int]]]:
            """The captions of each image as word ids. A word without an id gets the next free id."""
            for texts in references:
                yield [[ids.setdefault(word, len(ids)) for word in self._words(text)] for text in texts]

        self.scorer = build_index(encoded(), caption_documents=caption_documents).to(device)
        self._word_ids = None if vocabulary.subwords is None else ids
        ignored = [vocabulary.pad, vocabulary.sos]
        ignored += [number for word, number in vocabulary.ids.items() if not word.strip()]  # white space is no word
        self._ignored = torch.tensor(ignored, device=device)

    def __call__(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """CIDEr-D of R captions on the usual scale from 0 to 10, as a float64 tensor (R,).

        tokens: (R, T) on the reward's device. Tokens after the first EOS are ignored. indices: (R,) int64 on the same
        device, the number of each caption's image in the order of the references.
        """
        if self._word_ids is not None:
            return self.scorer.score(*self._metric_words(tokens, self._word_ids), indices)
        is_eos = tokens == self.eos_id
        num_eos_before = is_eos.cumsum(1) - is_eos.long()
        is_word = (num_eos_before == 0) & ~torch.isin(tokens, self._ignored)
        if not self.eos:
            is_word &= ~is_eos
        order = (~is_word).long().argsort(stable=True, dim=1)  # moves the words to the front and keeps their order
        return self.scorer.score(tokens.gather(1, order), is_word.sum(1), indices)

    def _words(self, caption: str) -> list[str]:
        """The words of a reference, and EOS at the end if EOS counts as a word."""
        if self._vocabulary.subwords is None:
            tokens = self._vocabulary.tokenize(caption)
        else:
            tokens = _words_of(caption, self._language)
        words = [token for token in tokens if token.strip()]
        return [*words, EOS] if self.eos else words

    def _metric_words(self, tokens: Tensor, word_ids: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """Splits captions of subwords into the metrics' words: ids (R, W) with padding, and the lengths (R,)."""
        rows = [tuple(row) for row in tokens.tolist()]
        encoded: dict[tuple[int, ...], Tensor] = {}
        for row in dict.fromkeys(rows):
            words = _words_of(self._vocabulary.decode(row), self._language)
            if self.eos and self.eos_id in row:
                words.append(EOS)
            new_ids: dict[str, int] = {}  # of words that no reference has
            ids = [
                word_ids[word] if word in word_ids else len(word_ids) + new_ids.setdefault(word, len(new_ids))
                for word in words
            ]
            encoded[row] = torch.tensor(ids, dtype=torch.int64)
        captions = [encoded[row] for row in rows]
        lengths = torch.tensor([len(caption) for caption in captions], device=tokens.device)
        return pad_sequence(captions, batch_first=True).to(tokens.device), lengths


def _words_of(caption: str, language: str) -> list[str]:
    """The words of a raw caption for CIDEr-D. A PTB token with a space in it ("1 1/2") is two words."""
    return [word for token in metric_words(caption, language) for word in token.split()]


def length(captions: CaptionWords) -> np.ndarray:
    """The number of words of each caption. A negative weight makes captions shorter."""
    return np.array([len(words) for words in captions.predictions], np.float64)


def repetition(captions: CaptionWords) -> np.ndarray:
    """For each caption, the number of its pairs of neighboring words that repeat an earlier pair.

    "a dog and a dog" has 1, "dog dog dog dog" has 2. A negative weight makes captions repeat less.
    """
    pairs = [list(pairwise(words)) for words in captions.predictions]
    return np.array([len(each) - len(set(each)) for each in pairs], np.float64)


# Each function returns the values of N captions, float64 (N,). The value of a caption does not depend on the others.
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

    If a reward needs words, the host splits sampled captions and the references of their images. The split takes 0.1 to
    0.3 ms per distinct sampled caption of a call, and per reference of a new image. The words of references are kept
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
        """captions_of: returns the raw captions of an image by its number. cider_d: of the images in the same order."""
        self.weights = dict(sorted(weights.items()))  # so that the order in a file does not change the sum's rounding
        self._cider_d, self._vocabulary, self._language = cider_d, vocabulary, language
        # The function must not refer to `self`, because a cycle would keep a finished stage's index in a GPU's memory.
        self._of_image = lru_cache(MAX_IMAGES)(lambda index: [_split(text, language) for text in captions_of(index)])

    def __call__(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum (R,) for R captions, and each reward's values (R,) without weight by name. All are float64.

        tokens, indices: see `CiderDReward`.
        """
        values = {}
        if CIDER_D in self.weights:
            values[CIDER_D] = self._cider_d(tokens, indices)
        names = self.weights.keys() & WORD_REWARDS.keys()
        if names:
            captions, numbers = self._words(tokens, indices)
            for name in names:
                values[name] = torch.from_numpy(WORD_REWARDS[name](captions))[numbers].to(tokens.device)
        parts = [weight * values[name] for name, weight in self.weights.items()]
        return torch.stack(parts).sum(0), values

    def _words(self, tokens: Tensor, indices: Tensor) -> tuple[CaptionWords, Tensor]:
        """The words of each distinct pair (caption, image), and the number of each row's pair (R,), on the host."""
        rows = [tuple(row) for row in tokens.tolist()]
        pairs = list(zip(rows, indices.tolist(), strict=True))
        words = {row: _split(self._vocabulary.decode(row), self._language) for row in dict.fromkeys(rows)}
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        predictions = [words[row] for row, _ in numbers]
        captions = CaptionWords(predictions, [self._of_image(index) for _, index in numbers])
        return captions, torch.tensor([numbers[pair] for pair in pairs])


def _split(caption: str, language: str) -> list[str]:
    """The words of a caption. Equal words share one object, which saves memory, because references repeat words."""
    return list(map(sys.intern, metric_words(caption, language)))
