"""The paired bootstrap."""

from __future__ import annotations

import numpy as np
import pytest

from raycap.pipeline.evaluation.comparison.bootstrap import paired_difference


def test_the_interval_is_the_normal_one_for_many_images() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 4000), generator.normal(0.95, 0.5, 4000)
    difference = paired_difference([a.tolist()], [b.tolist()])
    error = (a - b).std() / np.sqrt(len(a))
    assert difference.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert difference.low == pytest.approx(difference.mean - 1.96 * error, abs=0.1 * error)
    assert difference.high == pytest.approx(difference.mean + 1.96 * error, abs=0.1 * error)
    assert paired_difference([a.tolist()], [b.tolist()]) == difference, "equal input gives an equal interval"


def test_the_interval_covers_the_true_mean_at_its_confidence() -> None:
    generator, inside = np.random.default_rng(1), 0
    for trial in range(200):
        difference = paired_difference([generator.normal(0.1, 1, 80).tolist()], [[0.0] * 80], resamples=500, seed=trial)
        inside += difference.low <= 0.1 <= difference.high
    assert 0.88 <= inside / 200 <= 0.99


def simulated(generator: np.random.Generator, seeds: int, seed_effects: float, images: np.ndarray) -> np.ndarray:
    """Scores (seeds, images), which are sums of normal effects: of a seed, of an image, and of a seed on an image."""
    own = generator.normal(0, 0.5, (seeds, len(images)))
    return generator.normal(0, seed_effects, (seeds, 1)) + images + own


@pytest.mark.parametrize(
    ("counts", "seed_effects"), [((3, 3), 0.0), ((3, 3), 0.02), ((4, 5), 0.1), ((2, 2), 0.1), ((1, 5), 0.1)]
)
def test_the_interval_covers_the_true_difference_of_systems_with_seeds(
    counts: tuple[int, int], seed_effects: float
) -> None:
    """400 simulations of 500 images. The seeds' effects range from none to several times the images' error of 0.03."""
    generator, inside = np.random.default_rng(2), 0
    for trial in range(400):
        images = generator.normal(1, 0.7, 500)
        a, b = (simulated(generator, count, seed_effects, images) for count in counts)
        difference = paired_difference(a + 0.1, b, resamples=300, seed=trial)  # type: ignore[arg-type]
        inside += difference.low <= 0.1 <= difference.high
    assert 0.92 <= inside / 400 <= 0.99
