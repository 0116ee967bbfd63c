"""Fits the confidence in captions on a validation split, with scikit-learn."""

from __future__ import annotations

import logging

import numpy as np

from raycap.pipeline.evaluation.confidence.confidence import MAX_CIDER, Confidence, Linear
from raycap.pipeline.evaluation.results import SplitScores

logger = logging.getLogger(__name__)

MIN_IMAGES = 50  # for 10 estimated numbers; the penalty allows fewer than the usual 10 for each
L2 = 1.0  # the penalty on the squared weights, which are those of standardized signals; the biases have none


def good_by_image(result: SplitScores, good_ciderd: float | None) -> dict[int, bool]:
    """Whether the caption of each scored image with signals is good; {} if that is not defined or not computed.

    good_ciderd: as in `Confidence`.
    """
    if good_ciderd is None:
        return {image: hit for image, hit in result.main_object_hits.items() if image in result.signals}
    return {image: score >= good_ciderd for image, score in result.cider_by_image.items() if image in result.signals}


def fit_split(result: SplitScores, search: str, good_ciderd: float) -> Confidence | None:
    """The confidence that fits the captions of a split; None, with the reason in the log, if it cannot be fitted.

    search: the settings of the search as text. good_ciderd: a caption is good from this CIDEr-D on, except in the
    synthetic data set.
    """
    limit = None if result.main_object_hits else good_ciderd
    good = good_by_image(result, limit)
    ciderd = {image: score for image, score in result.cider_by_image.items() if image in good}
    if reason := _obstacle([good[image] for image in ciderd]):
        logger.info(f"confidence   none: {reason}")
        return None
    signals = np.array([result.signals[image] for image in ciderd])
    targets = np.array([good[image] for image in ciderd]), np.array(list(ciderd.values()))
    return fit_confidence(signals, *targets, search=search, good_ciderd=limit)


def _obstacle(good: list[bool]) -> str | None:
    """Why no confidence can be fitted on these images; None if one can."""
    if len(good) < MIN_IMAGES:
        return f"{len(good)} scored validation images, and a fit needs {MIN_IMAGES} or more"
    if len(set(good)) == 1:
        return f"{'all' if good[0] else 'none'} of {len(good)} validation captions are good, and a fit needs both kinds"
    return None


def fit_confidence(
    signals: np.ndarray, good: np.ndarray, ciderd: np.ndarray, *, search: str, good_ciderd: float | None
) -> Confidence:
    """A logistic regression of `good` and a ridge regression of `ciderd`, both with the penalty L2.

    signals: (n, len(SIGNALS)). good: (n,) bool with both values. ciderd: (n,). The logistic regression minimizes the
    sum of the negative log-likelihoods plus L2 / 2 times the sum of squared weights.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    mean, scale = signals.mean(0), signals.std(0)
    scale = np.where(scale > 1e-6, scale, 1.0)  # a signal that is the same for all images
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
