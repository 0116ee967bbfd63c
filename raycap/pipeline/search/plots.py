"""The plot of a search: scores over costs with the Pareto front, as a PNG file and as SVG for the page.

In the SVG every color becomes a CSS variable of the page, so that one drawing fits the light and the dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raycap.models.captioner import TABLE_6_IMAGES
from raycap.models.config import Values
from raycap.pipeline.evaluation.comparison.published import ablation
from raycap.pipeline.search.ablations import printed_label
from raycap.pipeline.search.results import PointResult, heading, unit
from raycap.pipeline.search.spec import COSTS, SCORE, Search

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# text, secondary text, grid lines and background; then finished points, the front and the paper's points
INK, MUTED, RULE, PAGE_COLOR = "#14201c", "#52605a", "#d5dcd9", "#ffffff"
ACCENT, BEST, PAPER_COLOR = "#0b6b58", "#b5401f", "#3a5fa8"
# the page's CSS variable for each color
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAGE_COLOR: "--surface", ACCENT: "--accent", BEST: "--low"}
VARIABLES[PAPER_COLOR] = "--paper"
LABEL_OFFSETS = [  # from a point to its label, in typographic points; tried in this order
    (7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -16), (14, 14), (-14, 14), (14, -22), (-14, -22),
]  # fmt: skip


def _figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAGE_COLOR)
    FigureCanvasAgg(figure)
    return figure


def cost_axis(search: Search) -> str:
    """The horizontal axis: the first cost among the objectives, else multiply-accumulates."""
    return next((name for name in search.config.objectives if name in COSTS), search.cost)


def score_axis(search: Search) -> str:
    """The vertical axis: the first objective that is not a cost, else CIDEr-D, on the reported split."""
    return search.reported(next((name for name in search.config.objectives if name not in COSTS), SCORE))


def pareto_plot(search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult]) -> Figure:
    """Plots scores over costs: finished points with their spread, the Pareto front, stopped points as rings.

    The front is a line if the scores are those that have chosen it. With `compare: expansionnet_v2` a second panel has
    the paper's ablation.
    """
    has_paper = search.config.compare == "expansionnet_v2"  # the other papers print no costs
    figure = _figure(12.5 if has_paper else 8.6, 5.4)
    panels = figure.subplots(1, 2 if has_paper else 1, squeeze=False).ravel().tolist()
    _draw_points(panels[0], search, results, on_front)
    if has_paper:
        _draw_paper(panels[1])
        panels[0].set_title("this search", loc="left", fontsize=10, color=INK)
        panels[1].set_title("the paper: Table I over Table VI", loc="left", fontsize=10, color=INK)
        panels[1].set_xlabel(f"{heading(search, 'macs')} per image", color=INK)
        panels[1].set_ylabel("CIDEr-D (Karpathy validation, beam 3)", color=INK)
    for axes in panels:
        axes.set_facecolor(PAGE_COLOR)
        axes.grid(True, color=RULE, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
        axes.spines[:].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                loc="lower left", bbox_to_anchor=(-0.01, 1.05 if has_paper else 1.0), ncols=2 if has_paper else 4,
                fontsize=8.5, frameon=False, labelcolor=INK, borderaxespad=0.2,
            )  # fmt: skip
    return figure


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
    """Draws the points of the search, the Pareto front as a staircase, and labels."""
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
    base = base_point(search)
    at_base = [point for point in finished + stopped if point.result.point == base]
    if at_base:
        label = "the base configuration"
        axes.plot(*_coordinates(at_base), "o", mfc="none", mec=INK, ms=15, mew=1.2, label=label, zorder=1)
    cost = cost_axis(search)
    axes.set_xlabel(heading(search, cost) + (" per image" if cost.startswith("macs") else ""), color=INK)
    prefix = "validation " if search.reports_validation else ""
    axes.set_ylabel(prefix + heading(search, score_axis(search)), color=INK)
    axes.margins(0.14, 0.14)  # space for labels on each side, as a share of the axes
    others = [point for point in finished if point not in line]
    groups = [(line, BEST), (others, INK), (stopped, MUTED)]
    labels = [(point.cost, point.score, point.result.label, color) for points, color in groups for point in points]
    costs, scores = _coordinates(line if search.reports_validation else [])
    # (2 N - 1, 2): a staircase, because up to the next point's cost the best score stays the same
    corners = np.column_stack([np.repeat(costs, 2)[1:], np.repeat(scores, 2)[:-1]])
    _write_labels(axes, labels, size=8, corners=corners)


def _coordinates(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    """The costs and the scores, as Matplotlib needs them."""
    return [point.cost for point in points], [point.score for point in points]


def base_point(search: Search) -> Values | None:
    """The point whose model is the base configuration's.

    None when the space does not contain it, has other than model keys, or is too large to search through.
    """
    if search.space.size > 10_000 or not all(key.startswith("model.") for key in search.space.keys):
        return None
    seed, base = search.config.seeds[0], search.base.model
    return next((point for point in search.space.points() if search.trial_config(point, seed).model == base), None)


def _draw_paper(axes: Axes) -> None:
    """Draws the rows of ExpansionNet v2's ablation with their names."""
    xs = [row.macs / TABLE_6_IMAGES / unit("macs") for row in ablation()]
    ys = [row.scores[SCORE] for row in ablation()]
    axes.plot(xs, ys, "D", mfc=PAPER_COLOR, mec=PAGE_COLOR, ms=7, label="the paper's rows", zorder=3)
    axes.margins(0.18, 0.12)
    labels = [(x, y, printed_label(row), PAPER_COLOR) for x, y, row in zip(xs, ys, ablation(), strict=True)]
    _write_labels(axes, labels, size=7.5, corners=np.empty((0, 2)))


def _scale_costs(axes: Axes, costs: Sequence[float]) -> None:
    """Makes the cost axis logarithmic if costs differ more than threefold, so that cheap points do not overlap."""
    from matplotlib.ticker import LogLocator

    if costs and min(costs) > 0 and max(costs) > 3 * min(costs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()


def _write_labels(
    axes: Axes, points: Sequence[tuple[float, float, str, str]], size: float, corners: np.ndarray
) -> None:
    """Writes labels in a font of `size` typographic points next to their points, each given as (x, y, text, color).

    A label that would cover another point, another label or the line through the `corners` (N, 2) is left out.
    """
    from matplotlib.path import Path as Line

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the scales and the size of the axes
    frame, line = axes.get_window_extent(), axes.transData.transform_path(Line(corners))
    pixels = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    radius = 5 * figure.dpi / 72  # a drawn point's radius in pixels: 5 typographic points of 1/72 inch
    boxes: list[Any] = []
    for number, (x, y, text, color) in enumerate(points):
        other_points = [pixel for other, pixel in enumerate(pixels) if other != number]
        for offset in LABEL_OFFSETS:
            side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
            label = axes.annotate(
                text, (x, y), xytext=offset, textcoords="offset points", fontsize=size, color=color, ha=side, zorder=5
            )
            label.set_in_layout(False)  # otherwise a label would shrink the axes
            box = label.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            covers_label = any(box.overlaps(other) for other in boxes)
            covers_point = box.padded(radius).count_contains(other_points) > 0
            if inside and not (covers_label or covers_point or line.intersects_bbox(box, filled=False)):
                boxes.append(box)
                break
            label.remove()


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=160, facecolor=PAGE_COLOR)
    return data.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element with CSS variables as colors."""
    import matplotlib

    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "raycap", "font.family": "sans-serif"}):
        figure.savefig(data, format="svg", facecolor="none", metadata={"Date": None})
    text = data.getvalue()
    text = text[text.index("<svg") :]  # without the XML header, which a page must not contain
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    tag, rest = text.split(">", 1)  # the page sets the size, so the width and height of the <svg> tag are removed
    text = re.sub(r'\s(width|height)="[^"]*"', "", tag) + ">" + rest
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    # a font's list of families is replaced by the page's font
    return re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1inherit", text)
