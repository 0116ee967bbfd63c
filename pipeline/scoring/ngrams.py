"""BLEU, ROUGE-L and CIDEr-D with the values of pycocoevalcap 1.2, computed by sorts and sums over integers.

A corpus consists of C captions, each of one image. Words are integers, and so are n-grams: the pair (index of the
(n-1)-gram, last word) is unique, so the ranks of these pairs number n-grams exactly for any vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ORDERS = 4  # BLEU-1..4 and CIDEr-D's n-grams
_SIGMA = 6.0  # CIDEr-D's Gaussian on the difference of lengths (Vedantam et al. 2015, section 6)
_BETA = 1.2  # ROUGE-L's weight of recall in coco-caption
_SMALL, _TINY = 1e-9, 1e-15  # as in bleu_scorer.py, for quotients of captions shorter than n


@dataclass(frozen=True)
class Counts:
    """The n-grams of one order n: R rows, one per distinct n-gram of each caption, sorted by caption."""

    caption: np.ndarray  # (R,) index of the caption
    ngram: np.ndarray  # (R,) index of the n-gram
    count: np.ndarray  # (R,) occurrences in the caption
    size: int  # number of distinct n-grams in the corpus


@dataclass(frozen=True)
class Corpus:
    """Predictions and references as word ids: caption i < images is image i's prediction, the others are references.

    words (W,): word ids of all captions. lengths (C,): words of each caption. image (C,): the image of each caption.
    """

    words: np.ndarray
    lengths: np.ndarray
    image: np.ndarray
    images: int

    @classmethod
    def build(cls, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> Corpus:
        """From tokens of one prediction and one or more references per image. Raises ValueError on a mismatch."""
        if len(predictions) != len(references) or not all(references):
            raise ValueError(
                f"every image needs one prediction and at least one reference: found {len(predictions)} predictions "
                f"and {sum(map(bool, references))} images with references"
            )
        captions = [*predictions, *(caption for image in references for caption in image)]
        image = [*range(len(predictions)), *(i for i, group in enumerate(references) for _ in group)]
        ids: dict[str, int] = {}
        words = [ids.setdefault(word, len(ids)) for caption in captions for word in caption]
        return cls(
            np.array(words, np.int64), np.array([len(c) for c in captions], np.int64), np.array(image), len(predictions)
        )

    @cached_property
    def reference_counts(self) -> np.ndarray:
        """(images,) number of references of each image."""
        return np.bincount(self.image[self.images :], minlength=self.images)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """The counts of order 1 to ORDERS."""
        captions = len(self.lengths)
        caption = np.repeat(np.arange(captions), self.lengths)
        remaining = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.words))  # words to the end
        start = np.arange(len(self.words))  # first words of the n-grams of this order
        index = np.zeros(len(self.words), np.int64)  # the (n-1)-gram at each start
        num_words = int(self.words.max(initial=0)) + 1
        result = []
        for order in range(1, ORDERS + 1):
            keep = remaining[start] >= order
            start, index = start[keep], index[keep]
            # An index is below the number of words in the corpus, so the product is far below 2^63.
            distinct, index = np.unique(index * num_words + self.words[start + order - 1], return_inverse=True)
            rows, count = np.unique(caption[start] * (len(distinct) + 1) + index, return_counts=True)
            row_caption, row_ngram = np.divmod(rows, len(distinct) + 1)
            result.append(Counts(row_caption, row_ngram, count, len(distinct)))
        return tuple(result)

    def match(self, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
        """Rows of references, and for each the prediction's row of the same image and n-gram: two (M,) indices."""
        keys = self.image[counts.caption] * (counts.size + 1) + counts.ngram
        split = int(np.searchsorted(counts.caption, self.images))  # the predictions' rows come first, sorted
        if not split:
            empty = np.zeros(0, np.int64)
            return empty, empty
        row = np.searchsorted(keys[:split], keys[split:])
        matches = np.flatnonzero(keys[:split][np.minimum(row, split - 1)] == keys[split:])
        return matches + split, row[matches]


def bleu(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """BLEU-1..4 with the closest reference length: corpus values (4,) and per-image values (4, images).

    Source: pycocoevalcap/bleu/bleu_scorer.py (`option="closest"`, the shorter of equally close lengths).
    """
    images = corpus.images
    length, reference_length = corpus.lengths[:images], corpus.lengths[images:]
    image = corpus.image[images:]
    distance = np.abs(reference_length - length[image])
    order = np.lexsort((reference_length, distance, image))
    first = np.concatenate(([0], np.cumsum(corpus.reference_counts)[:-1]))
    closest = reference_length[order][first]

    guess = np.maximum(0, length - np.arange(ORDERS)[:, None])  # (4, images)
    correct = np.zeros((ORDERS, images))
    for n, counts in enumerate(corpus.counts):
        reference, prediction = corpus.match(counts)
        most = np.zeros(len(counts.count), np.int64)  # the n-gram's largest count in one reference
        np.maximum.at(most, prediction, counts.count[reference])
        split = int(np.searchsorted(counts.caption, images))
        clipped = np.minimum(most[:split], counts.count[:split])
        correct[n] = np.bincount(counts.caption[:split], clipped, minlength=images)

    def score(correct: np.ndarray, guess: np.ndarray, length: np.ndarray, closest: np.ndarray) -> np.ndarray:
        precision = np.cumprod((correct + _TINY) / (guess + _SMALL), axis=0)
        geometric = precision ** (1.0 / np.arange(1, ORDERS + 1)).reshape(-1, *[1] * (correct.ndim - 1))
        ratio = (length + _TINY) / (closest + _SMALL)
        return geometric * np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)

    return score(correct.sum(1), guess.sum(1), length.sum(), closest.sum()), score(correct, guess, length, closest)


def cider_d(corpus: Corpus) -> np.ndarray:
    """CIDEr-D of each image (images,), n = 1..4, sigma 6, times 10; document frequencies over the images' references.

    Source: pycocoevalcap/cider/cider_scorer.py. An n-gram that no reference holds counts in the prediction's norm with
    a document frequency of 1; the length in the penalty is the number of bigrams. With one image every weight is
    log(1) = 0 and the value has no meaning: callers report it as unavailable.
    """
    images = corpus.images
    log_images = np.log(float(images))
    bigrams = np.maximum(corpus.lengths - 1, 0)
    image = corpus.image[images:]
    delta = (bigrams[image] - bigrams[images:]).astype(float)
    penalty = np.exp(-(delta**2) / (2 * _SIGMA**2))
    total = np.zeros(len(image))
    for counts in corpus.counts:
        split = int(np.searchsorted(counts.caption, images))
        width = counts.size + 1
        documents = np.unique(corpus.image[counts.caption[split:]] * width + counts.ngram[split:]) % width
        frequency = np.bincount(documents, minlength=width)
        weight = counts.count * (log_images - np.log(np.maximum(1.0, frequency)))[counts.ngram]
        norm = np.sqrt(np.bincount(counts.caption, weight**2, minlength=len(corpus.lengths)))
        reference, prediction = corpus.match(counts)
        product = np.minimum(weight[prediction], weight[reference]) * weight[reference]
        dot = np.bincount(counts.caption[reference] - images, product, minlength=len(image))
        norms = norm[image] * norm[images:]
        total += np.divide(dot, norms, out=np.zeros(len(dot)), where=norms != 0)
    return np.bincount(image, total * penalty, minlength=images) / ORDERS / corpus.reference_counts * 10.0


def rouge_l(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> np.ndarray:
    """ROUGE-L of each image (images,): the best precision and the best recall over its references, beta 1.2.

    Source: pycocoevalcap/rouge/rouge.py, where an empty caption is one empty word. The longest common subsequence is
    computed row by row in the bits of one integer (Hyyro 2004).
    """
    scores = np.zeros(len(predictions))
    for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True)):
        prediction = prediction or [""]
        masks: dict[str, int] = {}
        for position, word in enumerate(prediction):
            masks[word] = masks.get(word, 0) | 1 << position
        full = (1 << len(prediction)) - 1
        precision = recall = 0.0
        for caption in captions:
            caption = caption or [""]
            row = full
            for word in caption:
                if mask := masks.get(word):
                    both = row & mask
                    row = (row + both | row - both) & full
            common = len(prediction) - row.bit_count()
            precision = max(precision, common / len(prediction))
            recall = max(recall, common / len(caption))
        if precision and recall:
            scores[i] = (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)
    return scores
