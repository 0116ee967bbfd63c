"""CIDEr-D as defined (Vedantam et al. 2015), with dictionaries: a second implementation for tests and benchmarks.

It is plain and therefore slow. `pipeline.scoring.cider` must give the same values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Gram = tuple[Hashable, ...]
Caption = Sequence[Hashable]


class PlainCiderD:
    """Scores captions against reference captions; document frequencies over the images of `corpus`."""

    def __init__(self, corpus: Sequence[Sequence[Caption]]) -> None:
        self.frequency: Counter[Gram] = Counter()
        for image in corpus:
            self.frequency.update({gram for words in image for gram in grams(words)})
        self.documents = math.log(len(corpus))

    def score(self, caption: Caption, references: Sequence[Caption]) -> float:
        """CIDEr-D x 10: clipped tf-idf cosine over n = 1..4, a Gaussian penalty on the length (sigma 6)."""
        candidate, total = self._vector(caption), 0.0
        for reference in references:
            delta = max(len(caption) - 1, 0) - max(len(reference) - 1, 0)  # in bigrams, as the reference scorer counts
            for ours, theirs in zip(candidate, self._vector(reference), strict=True):
                dot = sum(min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in ours.items())
                if dot:
                    total += dot / norm(ours) / norm(theirs) * math.exp(-(delta**2) / 72)
        return 10 * total / 4 / len(references)

    def _vector(self, words: Caption) -> list[dict[Gram, float]]:
        parts: list[dict[Gram, float]] = [{}, {}, {}, {}]
        for gram, count in grams(words).items():
            parts[len(gram) - 1][gram] = count * (self.documents - math.log(max(1, self.frequency[gram])))
        return parts


def grams(words: Caption) -> Counter[Gram]:
    """All n-grams of a caption for n = 1..4."""
    return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))


def norm(part: dict[Gram, float]) -> float:
    """The Euclidean norm of a sparse vector."""
    return math.sqrt(sum(value**2 for value in part.values()))
