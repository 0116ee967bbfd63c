"""How well a confidence tells good captions from others: its calibration, and the risk at each coverage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from raycap.pipeline.evaluation.confidence.confidence import Confidence
from raycap.pipeline.evaluation.confidence.fit import good_by_image
from raycap.pipeline.evaluation.results import SplitScores

NUM_BINS = 10
COVERAGES = tuple(percent / 100 for percent in range(5, 101, 5))
RESAMPLES, INTERVAL = 1000, 0.95
CHUNK_VALUES = 2**22  # image numbers that are drawn together, which bounds the memory to about 64 MiB


class Bin(NamedTuple):
    """confidence: the mean of the bin's images. good: the share of their captions that are good."""

    confidence: float
    good: float
    num_images: int


class Risk(NamedTuple):
    """The share of captions that are not good among the most confident part of the images, with its interval."""

    coverage: float  # that part, above 0
    risk: float
    low: float
    high: float


@dataclass(frozen=True)
class Quality:
    """The quality of a confidence on one split.

    good: what a good caption is. mean: of the confidences. auroc: None if all captions are good, or none.
    """

    good: str
    mean: float
    calibration_error: float
    auroc: float | None
    bins: tuple[Bin, ...]
    risks: tuple[Risk, ...]  # by coverage

    @property
    def is_monotone(self) -> bool:
        """Whether a risk that never falls as the coverage grows fits into all intervals."""
        highest = np.maximum.accumulate([each.low for each in self.risks])
        return all(low <= each.high for low, each in zip(highest, self.risks, strict=True))

    def __str__(self) -> str:
        part, whole = next(each for each in self.risks if each.coverage >= 0.8), self.risks[-1]
        auroc = "" if self.auroc is None else f", AUROC {self.auroc:.3f}"
        return (
            f"mean {self.mean:.3f}, calibration error {self.calibration_error:.3f} ({len(self.bins)} bins of equal "
            f"size){auroc}, not good {whole.risk:.1%} of all captions and {part.risk:.1%} of the most confident "
            f"{part.coverage:.0%}" + ("" if self.is_monotone else "; the risk falls where the coverage grows")
        )

    def to_json(self) -> dict[str, Any]:
        """The entry `confidence` of a split in scores.json."""
        lists = {"bins": [each._asdict() for each in self.bins], "risks": [each._asdict() for each in self.risks]}
        return asdict(self) | lists | {"is_monotone": self.is_monotone}


def judged_quality(result: SplitScores, confidence: Confidence) -> Quality | None:
    """The quality of a confidence on a split; None if no image has both signals and a score."""
    good = good_by_image(result, confidence.good_ciderd)
    judgements = [confidence.judge(result.signals[image]) for image in good]
    values = np.array([judgement.confidence for judgement in judgements if judgement is not None])
    return measure_quality(values, np.array(list(good.values())), confidence.good) if len(values) else None


def measure_quality(confidences: np.ndarray, good: np.ndarray, meaning: str = "") -> Quality:
    """The quality of n confidences (n,) whose captions are good where `good` (n,) is True. meaning: of good."""
    bins = reliability(confidences, good)
    error = sum(each.num_images * abs(each.confidence - each.good) for each in bins) / len(good)
    risks = risk_coverage(confidences, good)
    return Quality(meaning, float(confidences.mean()), error, auroc(confidences, good), bins, risks)


def reliability(confidences: np.ndarray, good: np.ndarray) -> tuple[Bin, ...]:
    """NUM_BINS bins of equal size in the order of the confidences; fewer for fewer images.

    The mean of |confidence - good| over the images is the expected calibration error (Guo et al. 2017, arXiv
    1706.04599, eq. 3). That paper's bins have equal width, so that most images can be in one of them.
    """
    parts = np.array_split(np.argsort(confidences, kind="stable"), min(NUM_BINS, len(good)))
    return tuple(Bin(float(confidences[part].mean()), float(good[part].mean()), len(part)) for part in parts)


def auroc(confidences: np.ndarray, good: np.ndarray) -> float | None:
    """The probability that a good caption has a higher confidence than one that is not; equal ones count as half."""
    num_good, num_bad = int(good.sum()), int((~good).sum())
    if not num_good or not num_bad:
        return None
    _, inverse, counts = np.unique(confidences, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # the mean rank of equal values
    return float((ranks[good].sum() - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def risk_coverage(confidences: np.ndarray, good: np.ndarray, seed: int = 0) -> tuple[Risk, ...]:
    """The risk at COVERAGES (Geifman and El-Yaniv 2017, arXiv 1705.08500, eq. 1 and 2) with percentile intervals.

    Of n images, the ceil(coverage * n) with the highest confidence are covered; of equal ones, the first. The bootstrap
    draws RESAMPLES times n images with replacement.
    """
    bad = ~good[np.argsort(-confidences, kind="stable")]  # from the highest confidence on
    num_images = len(bad)
    covered = np.array([math.ceil(coverage * num_images - 1e-9) for coverage in COVERAGES])
    generator = np.random.default_rng(seed)
    parts, chunk = [], max(1, CHUNK_VALUES // num_images)
    for start in range(0, RESAMPLES, chunk):
        shape = (min(chunk, RESAMPLES - start), num_images)
        drawn = np.sort(generator.integers(0, num_images, shape), axis=1)
        parts.append(np.cumsum(bad[drawn], axis=1)[:, covered - 1] / covered)
    tail = (1 - INTERVAL) / 2
    low, high = np.quantile(np.concatenate(parts), [tail, 1 - tail], axis=0)
    risks = np.cumsum(bad)[covered - 1] / covered
    return tuple(Risk(*map(float, row)) for row in zip(COVERAGES, risks, low, high, strict=True))
