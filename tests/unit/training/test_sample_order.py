"""The order of samples: a permutation per epoch, a function of the seed, without visible structure."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.pipeline.training.batches import samples_at


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(samples_at(np.arange(size) + epoch * size, size, seed)) == list(range(size))


def test_the_order_is_as_recorded() -> None:
    """Another order would change every training run."""
    recorded = "8 6 7 5 2 4 11 3 10 1 9 0 10 7 4 3 8 5 2 1 6 11 9 0"
    assert samples_at(np.arange(24), 12, 7).tolist() == [*map(int, recorded.split())]


def test_an_order_has_no_structure() -> None:
    """Position and sample are independent, and the step from one sample to the next is irregular.

    The chi-squared statistic of a 10 x 10 table has 81 degrees of freedom: mean 81, variance 162. A shift or an affine
    map, which no correlation may show, gives a table that is far too uneven or far too even.
    """
    for seed in range(5):
        order = samples_at(np.arange(1000), 1000, seed)
        table, _, _ = np.histogram2d(np.arange(1000), order, bins=10)
        statistic = ((table - 10) ** 2 / 10).sum()
        assert 81 - 5 * 162**0.5 < statistic < 81 + 5 * 162**0.5
        assert len(np.unique(np.diff(order))) > 500
