"""A confidence with fixed numbers, for bundles of tests."""

from __future__ import annotations

from raycap.pipeline.evaluation.confidence import SIGNALS, Confidence, Linear


def make_confidence(search: str = "", bias: float = 0.5) -> Confidence:
    """A confidence that depends on the mean log-probability only. bias: of the log-odds."""
    rest = (0.0,) * (len(SIGNALS) - 1)
    return Confidence(
        search=search,
        good_ciderd=1.0,
        num_images=100,
        mean=(-1.0, *rest),
        scale=(0.5, *(1.0,) * len(rest)),
        log_odds=Linear((2.0, *rest), bias),
        ciderd=Linear((0.3, *rest), 1.0),
    )
