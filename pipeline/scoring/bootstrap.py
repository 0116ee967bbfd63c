"""Whether one model's captions are better than another's on the same images: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, CONFIDENCE, CHUNK = 10_000, 0.95, 256


class Difference(NamedTuple):
    """The mean of a - b over the images, its interval, and the share of resamples in which a is better."""

    mean: float
    low: float
    high: float
    better: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(
    a: Sequence[float],
    b: Sequence[float],
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Difference:
    """Percentile bootstrap of the mean difference of per-image scores (Koehn 2004: images drawn with replacement).

    Scores that are a mean over images (CIDEr-D, ROUGE-L, SPICE) are compared by it exactly as they are reported; BLEU
    is not such a mean. Memory: 256 resamples at a time. Raises ValueError for lists of other lengths or none.
    """
    if len(a) != len(b) or not len(a):
        raise ValueError(f"{len(a)} and {len(b)} scores; give one of each model for every image")
    gaps = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            gaps[generator.integers(0, len(gaps), (min(CHUNK, resamples - start), len(gaps)))].mean(1)
            for start in range(0, resamples, CHUNK)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(gaps.mean()), float(low), float(high), float((means > 0).mean()))
