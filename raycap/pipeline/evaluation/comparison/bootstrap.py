"""Paired bootstrap: tests whether one system is better than another on the same images, with one or several seeds."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.evaluation.scores.metrics import COMPARED_BY_IMAGE, LESS_IS_BETTER, MetricScores

if TYPE_CHECKING:
    from raycap.pipeline.evaluation.results import SplitScores

logger = logging.getLogger(__name__)

RESAMPLES = 10_000
CHUNK_VALUES = 2**22  # A bootstrap draws at most this many image indices at once (about 64 MiB).


@dataclass(frozen=True)
class Spread:
    """The statistics of one score over seeds. std: the sample standard deviation (n - 1), or None for one seed."""

    mean: float
    std: float | None
    min: float
    max: float
    values: tuple[float, ...]  # in the order of the seeds

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        std = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), std, min(values), max(values), tuple(values))

    def text(self, digits: int = 3, *, in_percent: bool = False) -> str:
        """The mean and the standard deviation as the text of a table's cell, such as `0.843 ± 0.004`."""
        factor, digits, unit = (100, 1, " %") if in_percent else (1, digits, "")
        std = "" if self.std is None else f" ± {factor * self.std:,.{digits}f}"
        return f"{factor * self.mean:,.{digits}f}{std}{unit}"


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over the images, with its confidence interval from low to high."""

    mean: float
    low: float
    high: float
    better: float  # the share of resamples in which a is better

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    less_is_better: bool = False,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Percentile bootstrap of the mean of a - b over images and seeds (Koehn 2004 for one seed of each system).

    a, b: (seeds, images) scores of a metric that is a mean over images, such as CIDEr-D but not BLEU. The numbers of
    seeds may differ, and the seeds of both sides are independent. less_is_better: if True, a is better if a - b is
    below 0. confidence: of the interval. seed: of the random draws.

    Each resample draws images with replacement, the same images for all seeds of both sides. Then it adds a random
    deviation for the choice of seeds. Seeds are not drawn with replacement, because 2 to 5 seeds give few distinct
    values and a variance that is too small by (n - 1)/n. Instead, the deviation is drawn from Student's t distribution,
    with the unbiased variance between seeds (`_seed_variance`) and the degrees of freedom of Welch (1947). A side with
    one seed gets the variance of the other side. With one seed on both sides, the interval holds for these two models
    only.

    Coverage of the 95 % interval in 1,000 simulations each, with 500 images, and a spread of seeds of 0 to 3 times the
    error from the images: 0.94 to 0.97 with 2 seeds per side, 0.95 to 0.98 with 3 to 10, 0.93 to 0.97 with 2 and 5,
    0.94 to 0.96 with 1 and 5. If seeds and images are drawn with replacement, the coverage with 2 seeds is 0.72.
    """
    sides = [np.asarray(side, np.float64) for side in (a, b)]
    differences = sides[0].mean(0) - sides[1].mean(0)
    num_images = len(differences)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    chunk = max(1, CHUNK_VALUES // num_images)
    for start in range(0, resamples, chunk):
        images = generator.integers(0, num_images, (min(chunk, resamples - start), num_images))  # a row per resample
        means[start : start + chunk] = differences[images].mean(1)
    variance, degrees = _variance_of_difference(sides)
    if variance > 0:
        means += math.sqrt(variance) * generator.standard_t(degrees, resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    better = means < 0 if less_is_better else means > 0
    return Difference(float(differences.mean()), float(low), float(high), float(better.mean()))


def compare(results: Sequence[SplitScores], others: Sequence[SplitScores]) -> dict[str, Difference]:
    """Logs the scores of two systems on a split side by side. Returns {metric: difference}, with 95 % intervals.

    results, others: the scores of one model per seed, all on the same images. Only metrics that are means over images
    have a difference. Raises JobFailedError if the models were scored on different images.
    """
    sides = [[result.scores for result in side if result.scores is not None] for side in (results, others)]
    if len({tuple(scores.image_ids) for side in sides for scores in side}) != 1:
        raise JobFailedError("some images could be read for one model and not for another; run the command again")
    over = "image" if len(results) == len(others) == 1 else "image and seed"
    width = max(9, *map(len, sides[0][0].by_name))
    logger.info(f"  {'':<{width}} {'this':>15} {'other':>15}   difference by {over}, 95 % interval")
    found = {}
    for name in sides[0][0].by_name:
        values = [_values(side, name) for side in sides]
        if len(values[0]) < len(results) or len(values[1]) < len(others):
            continue
        text = ""
        if name in COMPARED_BY_IMAGE:
            ours, theirs = ([each.by_name[name].per_image or [] for each in side] for side in sides)
            found[name] = paired_difference(ours, theirs, less_is_better=name in LESS_IS_BETTER)
            text = f"{found[name]}, better in {found[name].better:.1%} of resamples"
        cells = [Spread.of(side).text(digits=4) for side in values]
        logger.info(f"  {name:<{width}} {cells[0]:>15} {cells[1]:>15}   {text}")
    return found


def _values(models: Sequence[MetricScores], name: str) -> list[float]:
    """The scores of a metric, without the models that have no score of it."""
    values = [each.values.get(name) for each in models]
    return [value for value in values if value is not None]


def _variance_of_difference(sides: Sequence[np.ndarray]) -> tuple[float, float]:
    """The variance that seeds add to the difference of the two means, and its degrees of freedom.

    sides: two arrays of scores (seeds, images). Returns (0, 0) if no side has several seeds.
    """
    known = [(_seed_variance(side), len(side)) for side in sides if len(side) > 1]  # (variance, number of seeds)
    if not known:
        return 0.0, 0.0
    if len(known) == 1:  # the side with one seed gets the variance of the other side
        variance, count = known[0]
        return variance * sum(1 / len(side) for side in sides), count - 1
    terms = [(variance / count, count - 1) for variance, count in known]
    total = sum(term for term, _ in terms)
    if not total:
        return 0.0, 0.0
    return total, total**2 / sum(term**2 / degrees for term, degrees in terms)


def _seed_variance(scores: np.ndarray) -> float:
    """Estimates the variance between seeds of the mean score over unlimited images. scores: (seeds, images).

    The means over the given images also differ because each seed deviates in its own way on each image. The resampling
    of images already covers this part, so it is subtracted. The estimate of this part is the residual mean square of
    the two-way table of seeds and images, divided by the number of images.
    """
    num_seeds, num_images = scores.shape
    means = scores.mean(1)
    residuals = scores - means[:, None] - scores.mean(0) + means.mean()
    noise = float((residuals**2).sum()) / max(1, (num_seeds - 1) * (num_images - 1))
    return max(0.0, float(means.var(ddof=1)) - noise / num_images)
