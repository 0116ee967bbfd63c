"""The plot of a search: scores over costs with the Pareto front."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from raycap.pipeline.search.results import PointResult, heading, unit
from raycap.pipeline.search.spec import COSTS, SCORE, Search

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# text, secondary text, grid lines and background; then finished points and the front
INK, MUTED, RULE, PAGE_COLOR = "#14201c", "#52605a", "#d5dcd9", "#ffffff"
ACCENT, BEST = "#0b6b58", "#b5401f"


def cost_axis(search: Search) -> str:
    """The horizontal axis: the first cost among the objectives, else multiply-accumulates."""
    return next((name for name in search.config.objectives if name in COSTS), search.cost)


def score_axis(search: Search) -> str:
    """The vertical axis: the first objective that is not a cost, else CIDEr-D, on the reported split."""
    return search.reported(next((name for name in search.config.objectives if name not in COSTS), SCORE))


def pareto_plot(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> bytes:
    """A PNG file with scores over costs: finished points with their spread, the Pareto front, stopped points as rings.

    The front is a line if the scores are those that have chosen it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 5.4), layout="constrained", facecolor=PAGE_COLOR)
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.subplots()
    _draw_points(axes, search, results, on_front)
    axes.set_facecolor(PAGE_COLOR)
    axes.grid(True, color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    axes.spines[:].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8.5, frameon=False, labelcolor=INK)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=160)
    return data.getvalue()


class _Point(NamedTuple):
    """A point in the Pareto plot; the cost is in the unit that `heading` names."""

    cost: float
    score: float
    spread: float
    result: PointResult


def _points(search: Search, results: Sequence[PointResult], state: str) -> list[_Point]:
    """The points in this state that have a cost and a score."""
    cost_name, score_name = cost_axis(search), score_axis(search)
    points = []
    for result in results:
        cost, score = result.mean(cost_name), result.mean(score_name)
        if cost is not None and score is not None and result.state == state:
            points.append(_Point(cost / unit(cost_name), score, result.spread(score_name) or 0.0, result))
    return points


def _draw_points(axes: Axes, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> None:
    """Draws the points of the search, and the Pareto front as a staircase with labels."""
    finished, stopped = _points(search, results, "finished"), _points(search, results, "stopped")
    line = sorted(
        (point for point in finished if point.result in on_front), key=lambda point: (point.cost, point.score)
    )
    _scale_costs(axes, [point.cost for point in finished + stopped])
    if any(point.spread for point in finished):
        spreads = [point.spread for point in finished]
        axes.errorbar(*_coordinates(finished), spreads, fmt="none", ecolor=ACCENT, elinewidth=1, capsize=3)
    if finished:
        axes.plot(*_coordinates(finished), "o", mfc=ACCENT, mec=PAGE_COLOR, ms=8, label="finished", zorder=3)
    if stopped:
        label = "stopped early (score so far)"
        axes.plot(*_coordinates(stopped), "o", mfc="none", mec=MUTED, ms=6, label=label, zorder=2)
    if line:
        label = "Pareto front" + ("" if search.reports_validation else f" on {search.base.data.val_split}")
        axes.plot(
            *_coordinates(line), "o-" if search.reports_validation else "o", drawstyle="steps-post",
            color=BEST, mfc=BEST, mec=PAGE_COLOR, ms=9, lw=1.6, label=label, zorder=4,
        )  # fmt: skip
    for point in line:  # above the staircase, on its left
        place = (point.cost, point.score)
        axes.annotate(
            point.result.label, place, (-6, 6), textcoords="offset points", ha="right", fontsize=8, color=BEST
        )
    cost = cost_axis(search)
    axes.set_xlabel(heading(search, cost) + (" per image" if cost.startswith("macs") else ""), color=INK)
    prefix = "validation " if search.reports_validation else ""
    axes.set_ylabel(prefix + heading(search, score_axis(search)), color=INK)
    axes.margins(0.14, 0.14)  # space for labels, as a share of the axes


def _coordinates(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    """The costs and the scores, as Matplotlib needs them."""
    return [point.cost for point in points], [point.score for point in points]


def _scale_costs(axes: Axes, costs: Sequence[float]) -> None:
    """Makes the cost axis logarithmic if costs differ more than threefold, so that cheap points do not overlap."""
    from matplotlib.ticker import LogLocator

    if costs and min(costs) > 0 and max(costs) > 3 * min(costs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
