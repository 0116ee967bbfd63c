"""Two scores of models whose weights were interpolated: the grid of weights, the Pareto front and the chord.

The chord between two models has the weighted mean of their scores. Rewarded soups (Ramé et al., arXiv 2306.04488,
working hypothesis 1) suppose that interpolated weights score at least as high: they are on the chord or above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A model with the weights of its members, and its two scores, of which more is better."""

    weights: tuple[float, ...]
    scores: tuple[float, float]


def grid_size(num_members: int, parts: int) -> int:
    """The number of weights in `weight_grid`."""
    return math.comb(parts + num_members - 1, num_members - 1)


def weight_grid(num_members: int, parts: int) -> list[tuple[float, ...]]:
    """All weights that are multiples of 1 / parts with the sum 1, those with more of the first member first."""
    return [tuple(count / parts for count in counts) for counts in _shares(parts, num_members)]


def _shares(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of `count` whole numbers."""
    if count == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in _shares(total - first, count - 1):
            yield (first, *rest)


def ends(points: Sequence[Point]) -> list[Point]:
    """The points of the members by themselves, in the order of the members."""
    alone = [point for point in points if max(point.weights) == 1]
    return sorted(alone, key=lambda point: point.weights, reverse=True)


def chord(weights: Sequence[float], members: Sequence[Point]) -> tuple[float, float]:
    """The weighted means of the members' scores."""
    first, second = (
        math.fsum(weight * member.scores[axis] for weight, member in zip(weights, members, strict=True))
        for axis in (0, 1)
    )
    return first, second


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one dominates, by the first score.

    A point dominates another one if both scores are as high or higher, and one is higher.
    """

    def dominates(one: Point, other: Point) -> bool:
        return one.scores != other.scores and all(a >= b for a, b in zip(one.scores, other.scores, strict=True))

    front = [point for point in points if not any(dominates(other, point) for other in points)]
    return sorted(front, key=lambda point: point.scores)
