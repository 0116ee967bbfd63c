"""The plot of a search: scores over costs with the Pareto front."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from raycap.pipeline.evaluation.comparison.bootstrap import Spread
from raycap.pipeline.search.results import PointResult, SearchResults, heading
from raycap.pipeline.search.spec import COSTS, SCORE

FINISHED, FRONT, STOPPED, RULE = "#0b6b58", "#b5401f", "#52605a", "#d5dcd9"
LABEL_WIDTH = 36  # characters of a line in the legend


def pareto_plot(results: SearchResults) -> bytes:
    """A PNG file with scores over costs: finished points, stopped points as rings, and the Pareto front as steps.

    The points of the front have the numbers of their files front-N.yaml, which the legend explains. Bars are standard
    deviations over the seeds. The axes are the first cost and the first score among the objectives, else
    multiply-accumulates and CIDEr-D. The scores are those of the reported split. If another split has chosen the front,
    its points are not connected.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    search, objectives = results.search, results.search.config.objectives
    cost = next((name for name in objectives if name in COSTS), search.cost)
    score = search.reported(next((name for name in objectives if name not in COSTS), SCORE))
    shown = [point for point in results.points if point.values(cost) and point.values(score)]
    figure = Figure(figsize=(8.6, 5.4), dpi=160)
    axes = figure.subplots()

    def place(point: PointResult) -> tuple[float, float, float]:
        """The cost in the unit that `heading` names, the score, and its spread, 0 for one seed."""
        spread = Spread.of(point.values(score))
        return Spread.of(point.values(cost)).mean / COSTS[cost].unit, spread.mean, spread.std or 0.0

    def draw(points: Sequence[PointResult], label: str, **style: Any) -> None:
        if points:
            costs, scores, spreads = zip(*sorted(map(place, points)), strict=True)
            bars, style = spreads if any(spreads) else None, {"fmt": "o"} | style
            axes.errorbar(costs, scores, bars, label=label, capsize=3, elinewidth=1, **style)

    finished = [point for point in shown if point.state == "finished"]
    stopped = [point for point in shown if point.state == "stopped"]
    front = [point for point in finished if point in results.front]
    draw([point for point in finished if point not in front], "finished", ms=8, color=FINISHED, mec="white")
    draw(stopped, "stopped early (score so far)", ms=6, color=STOPPED, mfc="none")
    line: dict[str, Any] = {"fmt": "o-", "drawstyle": "steps-post", "lw": 1.6} if search.reports_validation else {}
    chosen_on = "" if search.reports_validation else f", chosen on {search.base.data.val_split}"
    draw(front, f"Pareto front{chosen_on}: N of front-N.yaml", ms=14, color=FRONT, mec="white", zorder=3, **line)
    explained = list[Any](axes.containers)
    for number, point in enumerate(results.front, 1):
        if point in front:
            middle: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 8, "color": "white"}
            axes.annotate(str(number), place(point)[:2], zorder=4, **middle)
            label = textwrap.fill(point.label, LABEL_WIDTH).replace("$", r"\$")  # `$` begins a formula
            explained += axes.plot([], [], marker=f"${number}$", color=FRONT, mew=0, ls="", label=label)
    costs = [place(point)[0] for point in shown]
    if costs and 0 < 3 * min(costs) < max(costs):  # so that cheap points do not overlap
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_xlabel(heading(search, cost) + (" per image" if cost.startswith("macs") else ""))
    axes.set_ylabel(("validation " if search.reports_validation else "") + heading(search, score))
    axes.margins(0.08, 0.1)
    axes.grid(color=RULE)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(handles=explained, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")  # with the whole legend
    return data.getvalue()
