"""The paired bootstrap."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.scoring.bootstrap import paired_difference


def test_the_interval_is_the_normal_one_for_many_images() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 4000), generator.normal(0.95, 0.5, 4000)
    difference = paired_difference(a.tolist(), b.tolist())
    error = (a - b).std() / np.sqrt(len(a))
    assert difference.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert difference.low == pytest.approx(difference.mean - 1.96 * error, abs=0.1 * error)
    assert difference.high == pytest.approx(difference.mean + 1.96 * error, abs=0.1 * error)
    assert paired_difference(a.tolist(), b.tolist()) == difference, "equal input gives an equal interval"


def test_the_interval_covers_the_true_mean_at_its_confidence() -> None:
    generator, inside = np.random.default_rng(1), 0
    for trial in range(200):
        difference = paired_difference(generator.normal(0.1, 1, 80).tolist(), [0.0] * 80, resamples=500, seed=trial)
        inside += difference.low <= 0.1 <= difference.high
    assert 0.88 <= inside / 200 <= 0.99


def test_pairs_that_do_not_match_are_refused() -> None:
    for a, b in (([1.0], []), ([], [])):
        with pytest.raises(ValueError, match="give one score of each model"):
            paired_difference(a, b)
