"""BLEU, ROUGE-L and CIDEr-D with the values of pycocoevalcap 1.2, and the metrics of diversity.

Words and n-grams are integers, so that arrays can be sorted and summed instead of counting in dictionaries. The number
of an n-gram is the rank of its pair (number of the (n-1)-gram, last word) among all such pairs. Unlike a hash, it is
exact for any size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ORDERS = 4  # BLEU and CIDEr-D use n-grams of 1 to 4 words
_SIGMA = 6.0  # the width of CIDEr-D's Gaussian penalty on the difference of lengths (Vedantam et al. 2015, section 6)
_BETA = 1.2  # the weight of recall in coco-caption's ROUGE-L
_SMALL, _TINY = 1e-9, 1e-15  # added to quotients as in bleu_scorer.py, because short captions have no n-grams


@dataclass(frozen=True)
class Counts:
    """The n-grams of one length n in R rows, sorted by caption. A row is a distinct n-gram of one caption."""

    caption: np.ndarray  # (R,) index of the caption
    ngram: np.ndarray  # (R,) index of the n-gram
    count: np.ndarray  # (R,) how often the caption contains the n-gram
    size: int  # the number of distinct n-grams in the corpus
    num_prediction_rows: int  # the number of rows that belong to predictions, which precede the rows of references


@dataclass(frozen=True)
class Corpus:
    """Predictions and references as word ids.

    words: (W,), the word ids of all captions. lengths: (C,), words per caption. image: (C,), the image of each caption.
    num_predictions: so many captions at the start are predictions, and the other captions are references. Caption i is
    the prediction of image i.
    """

    words: np.ndarray
    lengths: np.ndarray
    image: np.ndarray
    num_predictions: int

    @classmethod
    def build(cls, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> Corpus:
        """Builds the corpus of one prediction and one or more references per image, given as words."""
        captions = [*predictions, *(caption for image in references for caption in image)]
        image = np.concatenate((np.arange(len(predictions)), _group_numbers(references)))
        ids: dict[str, int] = {}
        words = np.array([ids.setdefault(word, len(ids)) for caption in captions for word in caption], np.int64)
        return cls(words, np.array([len(c) for c in captions], np.int64), image, len(predictions))

    @cached_property
    def reference_counts(self) -> np.ndarray:
        """The number of references of each image (images,)."""
        return np.bincount(self.image[self.num_predictions :], minlength=self.num_predictions)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """The counts of n-grams for n = 1 to ORDERS."""
        caption = np.repeat(np.arange(len(self.lengths)), self.lengths)  # the caption of each word
        # the number of words from each word to the end of its caption, which limits the n-grams that start there
        remaining = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(self.words))
        start = np.arange(len(self.words))  # the position of the first word of each n-gram of this order
        index = np.zeros(len(self.words), np.int64)  # the number of the (n-1)-gram at each start
        num_words = int(self.words.max(initial=0)) + 1
        result = []
        for order in range(1, ORDERS + 1):
            keep = remaining[start] >= order
            start, index = start[keep], index[keep]
            # Both factors are at most the number of words in the corpus, so the product does not overflow int64.
            distinct, index = np.unique(index * num_words + self.words[start + order - 1], return_inverse=True)
            rows, count = np.unique(caption[start] * (len(distinct) + 1) + index, return_counts=True)
            row_caption, row_ngram = np.divmod(rows, len(distinct) + 1)
            num_prediction_rows = int(np.searchsorted(row_caption, self.num_predictions))
            result.append(Counts(row_caption, row_ngram, count, len(distinct), num_prediction_rows))
        return tuple(result)

    def match(self, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
        """M pairs of rows with the same image and n-gram: the rows of references (M,) and of predictions (M,)."""
        keys = self.image[counts.caption] * (counts.size + 1) + counts.ngram
        prediction_keys, reference_keys = np.split(keys, [counts.num_prediction_rows])
        row = np.searchsorted(prediction_keys, reference_keys)  # the first prediction row whose key is not smaller
        candidates = np.flatnonzero(row < len(prediction_keys))
        matches = candidates[prediction_keys[row[candidates]] == reference_keys[candidates]]
        return matches + counts.num_prediction_rows, row[matches]


def _group_numbers(groups: Sequence[Sequence[object]]) -> np.ndarray:
    """The index of the group of each element, with the elements of all groups in order."""
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def bleu(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """BLEU-1..4 with the closest reference length: values over the corpus (4,), and for each image (4, images).

    Source: pycocoevalcap/bleu/bleu_scorer.py with `option="closest"`. If two lengths are equally close, the shorter one
    counts.
    """
    images = corpus.num_predictions
    length, reference_length = corpus.lengths[:images], corpus.lengths[images:]
    image = corpus.image[images:]
    # Sorted by image, then by the difference of lengths, then by length, so the first reference of an image is closest.
    order = np.lexsort((reference_length, np.abs(reference_length - length[image]), image))
    closest = reference_length[order][np.cumsum(corpus.reference_counts) - corpus.reference_counts]

    # BLEU's precision is correct / guess: n-grams of the prediction that a reference contains, divided by all of them.
    guess = np.maximum(0, length - np.arange(ORDERS)[:, None])  # (4, images)
    correct = np.zeros((ORDERS, images))
    for n, counts in enumerate(corpus.counts):
        reference, prediction = corpus.match(counts)
        max_count = np.zeros(counts.num_prediction_rows, np.int64)  # largest count of the n-gram in one reference
        np.maximum.at(max_count, prediction, counts.count[reference])
        clipped = np.minimum(max_count, counts.count[: counts.num_prediction_rows])
        correct[n] = np.bincount(counts.caption[: counts.num_prediction_rows], clipped, minlength=images)

    over_corpus = _bleu_values(correct.sum(1), guess.sum(1), length.sum(), closest.sum())
    return over_corpus, _bleu_values(correct, guess, length, closest)


def _bleu_values(correct: np.ndarray, guess: np.ndarray, length: np.ndarray, closest: np.ndarray) -> np.ndarray:
    """BLEU-1..4 (4, ...): geometric means of correct / guess (4, ...), times the penalty for the lengths (...)."""
    product = np.cumprod((correct + _TINY) / (guess + _SMALL), axis=0)
    exponents = (1.0 / np.arange(1, ORDERS + 1)).reshape(-1, *[1] * (correct.ndim - 1))  # 1/n in row n - 1
    ratio = (length + _TINY) / (closest + _SMALL)
    return product**exponents * np.exp(1 - 1 / np.minimum(ratio, 1))  # the last factor is 1 if no caption is too short


def cider_d(corpus: Corpus) -> np.ndarray:
    """CIDEr-D of each image (images,), for n = 1..4, sigma 6, times 10.

    Source: pycocoevalcap/cider/cider_scorer.py. The document frequency of an n-gram is the number of images whose
    references contain it. An n-gram that no reference contains gets the document frequency 1 and adds to the
    prediction's norm. The length in the penalty is the number of bigrams. For one image all weights are log(1) = 0, so
    the value has no meaning.
    """
    images = corpus.num_predictions
    image = corpus.image[images:]  # of each reference
    bigrams = np.maximum(corpus.lengths - 1, 0).astype(float)
    penalty = np.exp(-((bigrams[image] - bigrams[images:]) ** 2) / (2 * _SIGMA**2))
    total = np.zeros(len(image))
    for counts in corpus.counts:
        width = counts.size + 1
        in_references = slice(counts.num_prediction_rows, None)
        documents = corpus.image[counts.caption[in_references]] * width + counts.ngram[in_references]
        frequency = np.bincount(np.unique(documents) % width, minlength=width)
        weight = counts.count * (np.log(float(images)) - np.log(np.maximum(1.0, frequency)))[counts.ngram]  # tf-idf
        norm = np.sqrt(np.bincount(counts.caption, weight**2, minlength=len(corpus.lengths)))
        reference, prediction = corpus.match(counts)
        product = np.minimum(weight[prediction], weight[reference]) * weight[reference]
        dot = np.bincount(counts.caption[reference] - images, product, minlength=len(image))
        norms = norm[image] * norm[images:]
        total += np.divide(dot, norms, out=np.zeros(len(dot)), where=norms != 0)
    return np.bincount(image, total * penalty, minlength=images) / ORDERS / corpus.reference_counts * 10.0


def distinct_ngrams(several: Sequence[Sequence[Sequence[str]]], order: int) -> np.ndarray:
    """Div-n of each image (images,): distinct n-grams in all its captions, divided by the number of words.

    Source: Shetty et al. 2017 (arXiv 1703.10476). several: the captions of each image, as words. order: n. The value is
    0 if the captions have no words.
    """
    values = np.zeros(len(several))
    for i, captions in enumerate(several):
        ngrams = {tuple(words[k : k + order]) for words in captions for k in range(len(words) - order + 1)}
        values[i] = len(ngrams) / max(sum(map(len, captions)), 1)
    return values


def mutual_bleu(several: Sequence[Sequence[Sequence[str]]]) -> np.ndarray:
    """mBLEU-4 of each image (images,): the mean BLEU-4 of its captions, with its other captions as references.

    Source: Shetty et al. 2017 (arXiv 1703.10476). A low value means diverse captions. several: two or more captions of
    each image, as words.
    """
    predictions = [caption for captions in several for caption in captions]
    others = [[*captions[:i], *captions[i + 1 :]] for captions in several for i in range(len(captions))]
    image = _group_numbers(several)
    values = bleu(Corpus.build(predictions, others))[1][3]
    return np.bincount(image, values) / np.bincount(image)


def rouge_l(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> np.ndarray:
    """ROUGE-L of each image (images,), from the best precision and the best recall over its references, with beta 1.2.

    Source: pycocoevalcap/rouge/rouge.py, which treats an empty caption as one empty word. For speed, the bits of an
    integer represent a row of the table for the longest common subsequence (Hyyro 2004).
    """
    scores = np.zeros(len(predictions))
    for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True)):
        prediction = prediction or [""]
        masks: dict[str, int] = {}  # for each word, the bits of its positions in the prediction
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
            common = len(prediction) - row.bit_count()  # the length of the longest common subsequence
            precision = max(precision, common / len(prediction))
            recall = max(recall, common / len(caption))
        if precision and recall:
            scores[i] = (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)
    return scores
