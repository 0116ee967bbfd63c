"""Paired bootstrap: tests whether one model is better than another on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CHUNK = 256  # resamples that are computed together, which bounds the memory


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over the images, its confidence interval, and the share of resamples in which a is better."""

    mean: float
    low: float
    high: float
    better: float  # the share of resamples in which a is better

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, resamples: int = RESAMPLES, confidence: float = 0.95, seed: int = 0
) -> Difference:
    """Percentile bootstrap of the mean of a - b; images are sampled with replacement (Koehn 2004).

    a, b: one score per image, in the same order of images. The method needs metrics that are a mean over images, as
    CIDEr-D, ROUGE-L and SPICE are and BLEU is not. Raises ValueError for empty lists and lists of different lengths.
    """
    if len(a) != len(b) or not len(a):
        raise ValueError(f"{len(a)} and {len(b)} scores; give one score of each model for every image")
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    generator = np.random.default_rng(seed)
    parts = []
    for start in range(0, resamples, CHUNK):
        shape = (min(CHUNK, resamples - start), len(a))  # one row of image numbers per resample
        parts.append(differences[generator.integers(0, len(a), shape)].mean(1))
    means = np.concatenate(parts)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(differences.mean()), float(low), float(high), float((means > 0).mean()))
