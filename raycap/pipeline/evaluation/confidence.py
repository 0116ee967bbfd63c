"""The confidence in a caption: a calibrated probability that it is good, and its expected CIDEr-D.

The log-odds of the probability and the CIDEr-D are linear in a few numbers of the caption, its signals (`SIGNALS`).
`fit_split` fits a logistic regression for the probability and a ridge regression for the CIDEr-D on a validation split.
The bundle's file confidence.json stores one fit per search. A bundle may come from a stranger, so each number in the
file is checked against limits when it is read.

`Quality` measures how well a confidence separates good captions from bad ones: calibration, and risk by coverage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from raycap.models.config import NUMBER, Values
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.storage.untrusted.documents import parse_json

if TYPE_CHECKING:  # not at run time, because a served model lacks packages that the metrics import
    from raycap.pipeline.data.dataset import ImageId
    from raycap.pipeline.evaluation.results import SplitScores

FORMAT = 1
NUM_LOWEST = 4
NUM_FIRST = 4  # tokens after SOS, among which the main object is named
# The signals of a caption come from the log-probabilities of its tokens in nats, EOS included: their mean, their sum,
# the number of tokens, and the NUM_LOWEST lowest values (0 if a caption has fewer tokens). The number of tokens, by
# which the mean divides, includes SOS as in the ranking of beams. The last two signals describe the first NUM_FIRST
# tokens after SOS: their mean log-probability, and their mean energy (`captioning.search`), which is higher on images
# unlike the training images. There are no further signals, because others improved nothing (see BENCHMARKS.md).
SIGNALS = (
    *("mean", "sum", "length"),
    *(f"lowest {rank}" for rank in range(1, NUM_LOWEST + 1)),
    *("first mean", "first energy"),
)
MAX_CIDER = 10.0  # the largest CIDEr-D
logger = logging.getLogger(__name__)

MAX_FITS = 16  # fits per model, one per search; one more removes the oldest fit

Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False), NUMBER]
Numbers = Annotated[tuple[Number, ...], Field(min_length=len(SIGNALS), max_length=len(SIGNALS))]
Scales = Annotated[
    tuple[Annotated[float, Field(ge=1e-6, le=1e6), NUMBER], ...],
    Field(min_length=len(SIGNALS), max_length=len(SIGNALS)),
]
MIN_IMAGES = 50  # 5 for each of 10 estimated numbers; so few are enough because of the penalty L2
L2 = 1.0  # the penalty on the squared weights of the standardized signals; biases have no penalty
NUM_BINS = 10
COVERAGES = tuple(percent / 100 for percent in range(5, 101, 5))


class Judgement(NamedTuple):
    """The probability in [0, 1] that a caption is good, and its expected CIDEr-D in [0, MAX_CIDER]."""

    confidence: float
    expected_ciderd: float


@dataclass(frozen=True)
class Linear:
    """A linear function of standardized signals. weights: one per signal."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    weights: Numbers
    bias: Number

    def __call__(self, standardized: np.ndarray) -> float:
        return float(np.dot(self.weights, standardized) + self.bias)


@dataclass(frozen=True)
class Confidence:
    """A fit that gives the confidence in the best captions of one model and one search.

    search: the settings of the search as text. good_ciderd: the CIDEr-D from which a caption is good. If it is None, as
    for the synthetic data set, a caption is good if it names the main object. num_images: the number of images in the
    fit. mean, scale: the mean and the standard deviation of each signal over these images, by which a caption's signals
    are standardized. log_odds: gives the log-odds that a caption is good. ciderd: gives the expected CIDEr-D.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    search: Annotated[str, Field(max_length=4096)]
    good_ciderd: Annotated[float, Field(ge=0, le=MAX_CIDER), NUMBER] | None
    num_images: Annotated[int, Field(gt=0, le=10**9), NUMBER]
    mean: Numbers
    scale: Scales
    log_odds: Linear
    ciderd: Linear

    @property
    def good(self) -> str:
        """Says in words when a caption is good."""
        return "the main object is named" if self.good_ciderd is None else f"CIDEr-D of {self.good_ciderd:g} or more"

    @property
    def digest(self) -> str:
        """A text that differs between fits: the first 16 hexadecimal digits of their SHA-256."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def judge(self, signals: Sequence[float]) -> Judgement | None:
        """The confidence in a caption with these signals, or None if it has no signals."""
        if not signals:
            return None
        standardized = (np.asarray(signals, np.float64) - self.mean) / self.scale
        probability = (1 + math.tanh(self.log_odds(standardized) / 2)) / 2  # the logistic function, safe from overflow
        return Judgement(probability, min(max(self.ciderd(standardized), 0.0), MAX_CIDER))


def caption_signals(log_probs: np.ndarray, lengths: np.ndarray, energies: np.ndarray) -> list[tuple[float, ...]]:
    """The signals of n captions in the order of SIGNALS, or () for a caption that the search did not find.

    log_probs: (n, T), the log-probability of each token in nats, 0 at SOS and after the end. lengths: (n,), the number
    of tokens with SOS and EOS, 2 or more. energies: (n,), the mean energy of the first NUM_FIRST tokens
    (`captioning.search`).
    """
    sums = log_probs.sum(1, dtype=np.float64)
    padded = np.pad(log_probs, ((0, 0), (0, NUM_LOWEST)))
    lowest = np.sort(padded, axis=1)[:, :NUM_LOWEST]
    firsts = log_probs[:, 1 : NUM_FIRST + 1].sum(1, dtype=np.float64) / np.minimum(lengths - 1, NUM_FIRST)
    table = np.column_stack((sums / lengths, sums, lengths, lowest, firsts, energies))
    return [tuple(row.tolist()) if np.isfinite(row).all() else () for row in table.round(6)]


def find_fit(fits: Sequence[Confidence], search: str) -> Confidence | None:
    """The confidence that was fitted with this search, or None if there is none."""
    return next((fit for fit in fits if fit.search == search), None)


def with_fit(fits: Sequence[Confidence], fit: Confidence) -> tuple[Confidence, ...]:
    """The fits of a model with a new one, which replaces the fit of the same search. At most MAX_FITS remain."""
    others = [each for each in fits if each.search != fit.search]
    return (*others, fit)[-MAX_FITS:]


def dump_confidences(fits: Sequence[Confidence]) -> str:
    """The text of confidence.json."""
    return json.dumps({"format": FORMAT, "signals": SIGNALS, "fits": [asdict(fit) for fit in fits]}, indent=1)


@dataclass(frozen=True)
class _Content:
    """The content of confidence.json."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    format: Literal[1]
    signals: tuple[str, ...]
    fits: Annotated[tuple[Confidence, ...], Field(max_length=MAX_FITS)]

    def __post_init__(self) -> None:
        if self.signals != SIGNALS:
            raise ValueError(f"signals must be {', '.join(SIGNALS)}")


def parse_confidences(data: bytes, name: str) -> tuple[Confidence, ...]:
    """Parses confidence.json. Raises UserError for malformed content or other signals. name: the file, for messages."""
    return parse_section(_Content, parse_json(data, name), name).fits


def good_by_image(result: SplitScores, good_ciderd: float | None) -> dict[ImageId, bool]:
    """{image id: True if its caption is good, else False} for the scored images with signals.

    The result is {} if the scores that decide it were not computed. good_ciderd: as in `Confidence`.
    """
    if good_ciderd is None:
        return {image: hit for image, hit in result.main_object_hits.items() if image in result.signals}
    return {image: score >= good_ciderd for image, score in result.cider_by_image.items() if image in result.signals}


def fit_split(result: SplitScores, search: str, good_ciderd: float) -> Confidence | None:
    """Fits a confidence to the captions of a split. If that is not possible, logs the reason and returns None.

    search: the settings of the search as text. good_ciderd: the CIDEr-D from which a caption is good. In the synthetic
    data set it is ignored, because a caption is good there if it names the main object.
    """
    threshold = None if result.main_object_hits else good_ciderd
    good = good_by_image(result, threshold)
    ciderd = {image: score for image, score in result.cider_by_image.items() if image in good}
    is_good = np.array([good[image] for image in ciderd], bool)
    if len(is_good) < MIN_IMAGES:
        logger.info(f"confidence   none: {len(is_good)} scored validation images, and a fit needs {MIN_IMAGES} or more")
        return None
    if is_good.all() or not is_good.any():
        found = "all" if is_good.all() else "none"
        logger.info(
            f"confidence   none: {found} of {len(is_good)} validation captions are good, and a fit needs both kinds"
        )
        return None
    signals = np.array([result.signals[image] for image in ciderd])
    return fit_confidence(signals, is_good, np.array(list(ciderd.values())), search=search, good_ciderd=threshold)


def fit_confidence(
    signals: np.ndarray, good: np.ndarray, ciderd: np.ndarray, *, search: str, good_ciderd: float | None
) -> Confidence:
    """Fits a logistic regression of `good` and a ridge regression of `ciderd`, both with the penalty L2.

    signals: (n, len(SIGNALS)). good: (n,) bool with both values. ciderd: (n,). The logistic regression minimizes the
    sum of the negative log-likelihoods plus L2 / 2 times the sum of squared weights.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    mean, scale = signals.mean(0), signals.std(0)
    scale = np.where(scale > 1e-6, scale, 1.0)  # avoids a division by 0 for a signal that is equal for all images
    standardized = (signals - mean) / scale
    logistic = LogisticRegression(C=1 / L2, tol=1e-8, max_iter=1000).fit(standardized, good)
    ridge = Ridge(alpha=L2).fit(standardized, ciderd.clip(0, MAX_CIDER))
    return Confidence(
        search=search,
        good_ciderd=good_ciderd,
        num_images=len(signals),
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        log_odds=Linear(tuple(logistic.coef_[0].tolist()), float(logistic.intercept_[0])),
        ciderd=Linear(tuple(ridge.coef_.tolist()), float(ridge.intercept_)),
    )


class Bin(NamedTuple):
    """Images with similar confidences. confidence: their mean. good: the share of their captions that are good."""

    confidence: float
    good: float
    num_images: int


class Risk(NamedTuple):
    """The share of bad captions among the images with the highest confidence."""

    coverage: float  # the share of all images that are counted, above 0
    risk: float  # the share of captions that are not good


@dataclass(frozen=True)
class Quality:
    """The quality of a confidence on one split.

    good: says when a caption is good. mean: the mean confidence. auroc: None if all captions are good, or none is.
    """

    good: str
    mean: float
    calibration_error: float
    auroc: float | None
    bins: tuple[Bin, ...]
    risks: tuple[Risk, ...]  # in the order of their coverage

    def __str__(self) -> str:
        of_most_confident = next(each for each in self.risks if each.coverage >= 0.8)
        auroc = "" if self.auroc is None else f", AUROC {self.auroc:.3f}"
        return (
            f"mean {self.mean:.3f}, calibration error {self.calibration_error:.3f} ({len(self.bins)} bins of equal "
            f"size){auroc}, not good {self.risks[-1].risk:.1%} of all captions and {of_most_confident.risk:.1%} of the "
            f"most confident {of_most_confident.coverage:.0%}"
        )

    def to_json(self) -> Values:
        """The entry `confidence` of a split in scores.json."""
        lists = {"bins": [each._asdict() for each in self.bins], "risks": [each._asdict() for each in self.risks]}
        return asdict(self) | lists


def judged_quality(result: SplitScores, confidence: Confidence) -> Quality | None:
    """The quality of a confidence on a split, or None if no image has both signals and a score."""
    good = good_by_image(result, confidence.good_ciderd)
    if not good:
        return None
    judgements = [confidence.judge(result.signals[image]) for image in good]
    confidences = np.array([judgement.confidence for judgement in judgements if judgement is not None])
    return measure_quality(confidences, np.array(list(good.values())), confidence.good)


def measure_quality(confidences: np.ndarray, good: np.ndarray, meaning: str = "") -> Quality:
    """The quality of n confidences (n,).

    good: (n,), True if the caption is good. meaning: says in words when a caption is good. The AUROC is the probability
    that a good caption has a higher confidence than a bad one. Equal confidences count as half.
    """
    from sklearn.metrics import roc_auc_score

    bins = reliability(confidences, good)
    error = sum(each.num_images * abs(each.confidence - each.good) for each in bins) / len(good)
    has_both = good.any() and not good.all()
    auroc = float(roc_auc_score(good, confidences)) if has_both else None
    return Quality(meaning, float(confidences.mean()), error, auroc, bins, risk_coverage(confidences, good))


def reliability(confidences: np.ndarray, good: np.ndarray) -> tuple[Bin, ...]:
    """Sorts images by confidence and splits them into NUM_BINS bins of equal size, or fewer if there are fewer images.

    The mean of |confidence - good| over the images is the expected calibration error (Guo et al. 2017, arXiv
    1706.04599, eq. 3). The bins of that paper have equal width instead, so that one bin can contain most images.
    """
    parts = np.array_split(np.argsort(confidences, kind="stable"), min(NUM_BINS, len(good)))
    return tuple(Bin(float(confidences[part].mean()), float(good[part].mean()), len(part)) for part in parts)


def risk_coverage(confidences: np.ndarray, good: np.ndarray) -> tuple[Risk, ...]:
    """The risk at COVERAGES (Geifman and El-Yaniv 2017, arXiv 1705.08500, eq. 1 and 2).

    Of n images, the ceil(coverage * n) with the highest confidence are covered. Among images with equal confidence, the
    first ones are covered.
    """
    bad = ~good[np.argsort(-confidences, kind="stable")]  # sorted by confidence, the highest first
    # 1e-9 keeps rounding errors from covering one more image
    covered = np.array([math.ceil(coverage * len(bad) - 1e-9) for coverage in COVERAGES])
    risks = np.cumsum(bad)[covered - 1] / covered
    return tuple(Risk(*row) for row in zip(COVERAGES, risks.tolist(), strict=True))
