"""Two scores of models whose weights were interpolated: the grid of weights, the Pareto front, the chord, the picture.

The chord between two models has the weighted mean of their scores. Rewarded soups (Ramé et al., arXiv 2306.04488,
working hypothesis 1) suppose that interpolated weights score at least as high: they are on the chord or above it.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

INK, MUTED, RULE, ACCENT, BEST = "#14201c", "#52605a", "#d5dcd9", "#0b6b58", "#b5401f"
OFFSET = 7  # of a label from its point in both directions, in typographic points


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


def draw_front(points: Sequence[Point], names: Sequence[str], metrics: tuple[str, str]) -> dict[str, bytes]:
    """The picture as {"png": content, "svg": content}.

    points: with those of the members by themselves. names: of the members. metrics: of the two axes.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    members, front = ends(points), pareto_front(points)
    if len(members) == 2:  # in the order of their weights; more members have an area of points
        axes.plot(*_columns(points), "-", color=RULE, lw=1.2, zorder=1)
    for number, pair in enumerate(itertools.combinations(members, 2)):
        label = "" if number else "chord: the members' weighted mean"
        axes.plot(*_columns(pair), "--", color=MUTED, lw=1.2, label=label, zorder=2)
    axes.plot(*_columns(points), "o", color=ACCENT, ms=6, label="interpolated weights", zorder=3)
    axes.plot(*_columns(front), "o", mfc="none", mec=BEST, mew=1.8, ms=10, label="Pareto front", zorder=4)
    middle = sum(axes.get_xlim()) / 2
    for name, member in zip(names, members, strict=True):  # a label extends towards the middle
        side, shift = ("left", OFFSET) if member.scores[0] < middle else ("right", -OFFSET)
        text = axes.annotate(
            name, member.scores, xytext=(shift, OFFSET), textcoords="offset points", ha=side, fontsize=9, color=INK
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])  # readable on the lines
    axes.margins(0.14)
    axes.set_xlabel(metrics[0], color=INK)
    axes.set_ylabel(metrics[1], color=INK)
    axes.grid(True, color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    axes.spines[:].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, fontsize=8.5, frameon=False, labelcolor=INK
    )  # above the axes, where no point is
    pictures = {}
    with matplotlib.rc_context({"svg.hashsalt": "front"}):
        for kind, options in {"png": {"dpi": 160}, "svg": {"metadata": {"Date": None}}}.items():
            data = io.BytesIO()
            figure.savefig(data, format=kind, facecolor="white", **options)  # type: ignore[arg-type]
            pictures[kind] = data.getvalue()
    return pictures


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The first and the second scores, as Matplotlib needs them."""
    return [point.scores[0] for point in points], [point.scores[1] for point in points]
