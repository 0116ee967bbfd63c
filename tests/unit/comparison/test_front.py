"""The grid of weights, the Pareto front and the chord beside plain definitions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycap.pipeline.evaluation.comparison.front import Point, chord, ends, grid_size, pareto_front, weight_grid

SCORES = st.tuples(*[st.integers(0, 5).map(float)] * 2)


def test_the_grid_of_two_members_is_a_line() -> None:
    assert weight_grid(2, 4) == [(1, 0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0, 1)]
    assert weight_grid(3, 1) == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


@given(st.integers(2, 4), st.integers(1, 8))
def test_the_grid_has_all_shares(members: int, parts: int) -> None:
    every = itertools.product(range(parts + 1), repeat=members)
    expected = {tuple(count / parts for count in counts) for counts in every if sum(counts) == parts}
    grid = weight_grid(members, parts)
    assert len(grid) == len(set(grid)) == grid_size(members, parts) and set(grid) == expected


@given(st.lists(SCORES, min_size=1, max_size=12))
def test_the_front_has_the_points_that_no_other_is_better_than(scores: list[tuple[float, float]]) -> None:
    points = [Point((float(number),), each) for number, each in enumerate(scores)]
    front = pareto_front(points)
    for point in points:
        beaten = any(
            (a >= point.scores[0] and b > point.scores[1]) or (a > point.scores[0] and b >= point.scores[1])
            for a, b in scores
        )
        assert (point in front) != beaten
    assert [point.scores for point in front] == sorted(point.scores for point in front)


@given(st.integers(2, 3), st.integers(1, 5), st.data())
def test_the_chord_is_the_weighted_mean_of_the_ends(members: int, parts: int, data: st.DataObject) -> None:
    points = [Point(weights, data.draw(SCORES)) for weights in weight_grid(members, parts)]
    found = ends(points)
    assert [point.weights.index(1) for point in found] == list(range(members))
    for end in found:
        assert chord(end.weights, found) == end.scores
    for point in points:
        first = sum(weight * end.scores[0] for weight, end in zip(point.weights, found, strict=True))
        assert math.isclose(chord(point.weights, found)[0], first, abs_tol=1e-12)


def test_a_chord_needs_a_score_of_each_member() -> None:
    with pytest.raises(ValueError):
        chord((0.5, 0.5), [Point((1.0, 0.0), (1.0, 1.0))])
