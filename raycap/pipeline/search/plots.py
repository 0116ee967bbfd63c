"""The plot of a search: scores over costs with the Pareto front."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raycap.pipeline.search.results import PointResult, heading
from raycap.pipeline.search.spec import COSTS, SCORE, Search

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# text, secondary text, grid lines and background; then finished points and the front
INK, MUTED, RULE, PAGE_COLOR = "#14201c", "#52605a", "#d5dcd9", "#ffffff"
ACCENT, BEST = "#0b6b58", "#b5401f"
MAX_LINES = 32  # of text that fit beside the axes
NUMBER_SIZE = 20  # of a point's number, in pixels


class _Point(NamedTuple):
    """A point in the plot. Its cost is in the unit that `heading` names. spread: of the score, 0 for one seed."""

    cost: float
    score: float
    spread: float
    result: PointResult


def pareto_plot(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> bytes:
    """A PNG file with scores over costs: finished points with their spread, the Pareto front, stopped points as rings.

    The axes are the first cost and the first score among the objectives, else multiply-accumulates and CIDEr-D. Scores
    are those of the reported split. The front is a line if the scores are those that have chosen it, and its points
    have the numbers of their files front-N.yaml.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cost = next((name for name in search.config.objectives if name in COSTS), search.cost)
    score = search.reported(next((name for name in search.config.objectives if name not in COSTS), SCORE))
    points = _points(results, cost, score)
    finished = [point for point in points if point.result.state == "finished"]
    stopped = [point for point in points if point.result.state == "stopped"]
    front = [point for point in finished if point.result in on_front]

    figure = Figure(figsize=(8.6, 5.4), dpi=160, layout="constrained", facecolor=PAGE_COLOR)
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.subplots()
    axes.set_xlabel(heading(search, cost) + (" per image" if cost.startswith("macs") else ""), color=INK)
    axes.set_ylabel(("validation " if search.reports_validation else "") + heading(search, score), color=INK)
    _style(axes, [point.cost for point in finished + stopped])
    if any(spreads := [point.spread for point in finished]):
        axes.errorbar(*_coordinates(finished), spreads, fmt="none", ecolor=ACCENT, elinewidth=1, capsize=3)
    if finished:
        axes.plot(*_coordinates(finished), "o", mfc=ACCENT, mec=PAGE_COLOR, ms=8, label="finished", zorder=3)
    if stopped:
        label = "stopped early (score so far)"
        axes.plot(*_coordinates(stopped), "o", mfc="none", mec=MUTED, ms=6, label=label, zorder=2)
    if front:
        label = "Pareto front" + ("" if search.reports_validation else f" on {search.base.data.val_split}")
        axes.plot(
            *_coordinates(front), "o-" if search.reports_validation else "o", drawstyle="steps-post",
            color=BEST, mfc=BEST, mec=PAGE_COLOR, ms=9, lw=1.6, label=label, zorder=4,
        )  # fmt: skip
    if finished or stopped:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8.5, frameon=False, labelcolor=INK)
    if front:
        _number_front(figure, front, on_front)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _points(results: Sequence[PointResult], cost: str, score: str) -> list[_Point]:
    """The points that have a cost and a score, the cheapest first."""
    points = []
    for result in results:
        costs, scores = result.spread(cost), result.spread(score)
        if costs is not None and scores is not None:
            points.append(_Point(costs.mean / COSTS[cost].unit, scores.mean, scores.std or 0.0, result))
    return sorted(points, key=lambda point: point[:2])


def _number_front(figure: Figure, front: Sequence[_Point], on_front: Sequence[PointResult]) -> None:
    """Writes beside each point of the front the N of its file front-N.yaml, and lists the labels beside the axes.

    A number that would cover another one, or a point of the front, is moved up.
    """
    (axes,), lines = figure.axes, ["front-N.yaml"]
    for number, result in enumerate(on_front, 1):
        lines += textwrap.wrap(f"{number}  {result.label}", 40, subsequent_indent="     ")
    text = "\n".join(lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], "..."])
    axes.text(1.01, 1, text, transform=axes.transAxes, va="top", fontsize=8, color=BEST, parse_math=False)
    figure.draw_without_rendering()  # gives the axes their place
    pixels = axes.transData.transform([point[:2] for point in front])
    taken = [*pixels]  # the places of points and numbers
    for point, place in zip(front, pixels, strict=True):
        offset = np.array([-1.0, 0.7]) * NUMBER_SIZE  # above the staircase
        while any(abs(place + offset - other).max() < NUMBER_SIZE for other in taken):
            offset[1] += NUMBER_SIZE
        taken.append(place + offset)
        axes.annotate(
            str(on_front.index(point.result) + 1), point[:2], tuple(offset), textcoords="offset pixels", ha="center",
            va="center", fontsize=8, color=BEST, zorder=5, bbox={"fc": PAGE_COLOR, "ec": "none", "pad": 0.5},
        )  # fmt: skip


def _coordinates(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    """The costs and the scores, as Matplotlib needs them."""
    return [point.cost for point in points], [point.score for point in points]


def _style(axes: Axes, costs: Sequence[float]) -> None:
    """Sets colors and margins.

    The cost axis is logarithmic if costs differ more than threefold, so that cheap points do not overlap.
    """
    from matplotlib.ticker import LogLocator

    axes.set_facecolor(PAGE_COLOR)
    axes.grid(True, color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(0.14, 0.14)  # space for labels, as a share of the axes
    if costs and min(costs) > 0 and max(costs) > 3 * min(costs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
