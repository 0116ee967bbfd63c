"""CIDEr-D written like its definition, slowly, with dictionaries of words; `training.rewards.cider` must equal it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Gram = tuple[Hashable, ...]
Caption = Sequence[Hashable]


class PlainCiderD:
    """Scores captions. A document, for document frequencies, is all captions of one image in `corpus`."""

    def __init__(self, corpus: Sequence[Sequence[Caption]]) -> None:
        self.frequency: Counter[Gram] = Counter()
        for image in corpus:
            self.frequency.update({gram for words in image for gram in grams(words)})
        self.log_documents = math.log(len(corpus))

    def score(self, caption: Caption, references: Sequence[Caption]) -> float:
        """The CIDEr-D score, between 0 and 10 as in coco-caption.

        It is the mean over the references and over n = 1..4 of the clipped cosine between tf-idf vectors, times a
        Gaussian penalty on the difference of lengths with sigma 6, times 10.
        """
        vectors, total = self._vectors(caption), 0.0
        for reference in references:
            delta = max(len(caption) - 1, 0) - max(len(reference) - 1, 0)  # coco-caption counts bigrams as the length
            for ours, theirs in zip(vectors, self._vectors(reference), strict=True):
                dot = sum(min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in ours.items())
                if dot:
                    total += dot / norm(ours) / norm(theirs) * math.exp(-(delta**2) / (2 * 6**2))
        return 10 * total / 4 / len(references)

    def _vectors(self, words: Caption) -> list[dict[Gram, float]]:
        """tf-idf weights of the n-grams, one dictionary for each n."""
        parts: list[dict[Gram, float]] = [{}, {}, {}, {}]
        for gram, count in grams(words).items():
            parts[len(gram) - 1][gram] = count * (self.log_documents - math.log(max(1, self.frequency[gram])))
        return parts


def grams(words: Caption) -> Counter[Gram]:
    """All n-grams of a caption for n = 1..4."""
    return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))


def norm(part: dict[Gram, float]) -> float:
    """The Euclidean norm of a sparse vector."""
    return math.sqrt(sum(value**2 for value in part.values()))
