"""The plots of a search: the Pareto front and parallel coordinates, as PNG files and as SVG for the page.

In the SVG every color becomes a CSS variable of the page, so that one drawing fits the light and the dark theme.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from models.macs import TABLE_6_IMAGES
from pipeline.scoring.published import ablation
from pipeline.search.ablations import printed_label
from pipeline.search.results import UNITS, PointResult, head
from pipeline.search.space import Dimension, Space, short
from pipeline.search.spec import COSTS, SCORE, Search

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAGE = "#14201c", "#52605a", "#d5dcd9", "#ffffff"
ACCENT, BEST, PAPER = "#0b6b58", "#b5401f", "#3a5fa8"
# the page's CSS variable for each color
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAGE: "--surface", ACCENT: "--accent", BEST: "--low"}
VARIABLES[PAPER] = "--paper"
PNG_DPI = 160
LABEL_OFFSETS = [  # from a point to its label, in typographic points; tried in this order
    (7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -16), (14, 14), (-14, 14), (14, -22), (-14, -22),
]  # fmt: skip


def _figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAGE)
    FigureCanvasAgg(figure)
    return figure


def cost_axis(search: Search) -> str:
    """The horizontal axis of the Pareto plot: the first cost among the objectives, else multiply-accumulates."""
    return next((name for name in search.config.objectives if name in COSTS), search.cost)


def score_axis(search: Search) -> str:
    """The vertical axis of the Pareto plot: the first objective that is not a cost, else CIDEr-D."""
    return next((name for name in search.config.objectives if name not in COSTS), SCORE)


def pareto_plot(
    search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult], *, narrow: bool = False
) -> Figure:
    """Plots scores over costs: finished points with their spread, the Pareto front as a line, stopped points as rings.

    With `compare: expansionnet_v2` the paper's ablation is added. It shares the panel of the search if its costs are
    similar; otherwise it has a second panel.
    """
    has_paper = search.config.compare == "expansionnet_v2"  # the other papers print no costs
    in_same_panel = has_paper and _similar_costs(search, results)
    in_second_panel = has_paper and not in_same_panel
    if narrow:
        width, height = 4.3, 9.2 if in_second_panel else 5.0
    else:
        width, height = 12.5 if in_second_panel else 8.6, 5.4
    figure = _figure(width, height)
    shape = (2, 1) if narrow else (1, 2)
    panels = figure.subplots(*shape).ravel().tolist() if in_second_panel else [figure.subplots()]
    _draw_points(panels[0], search, results, on_front, narrow)
    if in_same_panel:
        _draw_paper(panels[0], search, label=not narrow)
    if in_second_panel:
        panels[0].set_title("this search", loc="left", fontsize=10, color=INK)
        _draw_paper(panels[1], search, label=True, narrow=narrow)
        panels[1].set_title("the paper: Table I over Table VI", loc="left", fontsize=10, color=INK)
        panels[1].set_xlabel(f"{head('macs')} per image", color=INK)
        panels[1].set_ylabel("CIDEr-D (Karpathy validation, beam 3)", color=INK)
    for axes in panels:
        _style_axes(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                loc="lower left", bbox_to_anchor=(-0.01, 1.05 if in_second_panel else 1.0),
                ncols=2 if narrow or in_second_panel else 4,
                fontsize=7.5 if narrow else 8.5, frameon=False, labelcolor=INK, borderaxespad=0.2,
            )  # fmt: skip
    return figure


class _Point(NamedTuple):
    """A point in the Pareto plot; the cost is in the unit that `head` names."""

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
            points.append(_Point(cost / UNITS.get(cost_name, 1), score, result.spread(score_name) or 0.0, result))
    return points


def _draw_points(
    axes: Axes, search: Search, results: Sequence[PointResult], on_front: Sequence[PointResult], narrow: bool
) -> None:
    """Draws the points of the search, their labels and the Pareto front."""
    finished, stopped = _points(search, results, "finished"), _points(search, results, "stopped")
    on_line = [point for point in finished if any(point.result is result for result in on_front)]
    line = sorted(on_line, key=lambda point: point[:2])
    others = [point for point in finished if point not in line]
    _scale_costs(axes, [point.cost for point in finished + stopped])
    if any(point.spread for point in finished):
        spreads = [point.spread for point in finished]
        axes.errorbar(*_coordinates(finished), spreads, fmt="none", ecolor=ACCENT, elinewidth=1, capsize=3)
    if finished:
        axes.plot(*_coordinates(finished), "o", mfc=ACCENT, mec=PAGE, ms=8, label="finished", zorder=3)
    if stopped:
        label = "stopped early (score so far)"
        axes.plot(*_coordinates(stopped), "o", mfc="none", mec=MUTED, ms=6, label=label, zorder=2)
    if line:
        axes.plot(
            *_coordinates(line), "o-", drawstyle="steps-post", color=BEST, mfc=BEST, mec=PAGE, ms=9, lw=1.6,
            label="Pareto front", zorder=4,
        )  # fmt: skip
    base = base_point(search)
    for point in finished + stopped:
        if base is not None and point.result.point == base:
            label = "the base configuration"
            axes.plot([point.cost], [point.score], "o", mfc="none", mec=INK, ms=15, mew=1.2, label=label, zorder=1)
    cost = cost_axis(search)
    axes.set_xlabel(head(cost) + (" per image" if cost.startswith("macs") else ""), color=INK)
    axes.set_ylabel(f"validation {score_axis(search)}", color=INK)
    axes.margins(0.14, 0.14)
    groups = [(line, BEST)] if narrow else [(line, BEST), (others, INK), (stopped, MUTED)]
    labels = [(point.cost, point.score, point.result.label, color) for points, color in groups for point in points]
    _write_labels(axes, labels, 7 if narrow else 8, _steps(line))


def _coordinates(points: Sequence[_Point]) -> tuple[list[float], list[float]]:
    """The costs and the scores."""
    return [point.cost for point in points], [point.score for point in points]


def _steps(line: Sequence[_Point]) -> list[tuple[float, float]]:
    """Coordinates along the stepped line of the front, which labels must not cover."""
    steps = []
    for start, end in itertools.pairwise(line):
        steps += [(cost, start.score) for cost in _between(start.cost, end.cost)]
        steps += [(end.cost, score) for score in _between(start.score, end.score)]
    return steps


def _between(start: float, end: float) -> list[float]:
    """39 evenly spaced numbers between two numbers."""
    return [start + (end - start) * number / 40 for number in range(1, 40)]


def base_point(search: Search) -> dict[str, Any] | None:
    """The point whose model is the base configuration's.

    None when the space does not contain it, has other than model keys, or is too large to search through.
    """
    has_only_model_keys = all(key.startswith("model.") for key in search.space.keys)
    if search.space.size > 10_000 or not has_only_model_keys:
        return None
    for point in search.points():
        if search.trial_config(point, search.config.seeds[0]).model == search.base.model:
            return point
    return None


def _draw_paper(axes: Axes, search: Search, *, label: bool, narrow: bool = False) -> None:
    """Draws the rows of ExpansionNet v2's ablation; with `label` also their names."""
    xs = [row.macs / TABLE_6_IMAGES / UNITS["macs"] for row in ablation()]
    ys = [row.scores[SCORE] for row in ablation()]
    axes.plot(xs, ys, "D", mfc=PAPER, mec=PAGE, ms=7, label="the paper's rows", zorder=3)
    if label:
        axes.margins(0.18, 0.12)
        _write_labels(
            axes,
            [(x, y, printed_label(row), PAPER) for x, y, row in zip(xs, ys, ablation(), strict=True)],
            6.5 if narrow else 7.5,
        )


def _scale_costs(axes: Axes, costs: Sequence[float]) -> None:
    """Makes the cost axis logarithmic if costs differ more than threefold, so that cheap points do not overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if costs and min(costs) > 0 and max(costs) > 3 * min(costs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())


def _similar_costs(search: Search, results: Sequence[PointResult]) -> bool:
    """Whether the paper's points and ours have similar costs and scores, so that one panel can show both."""
    if cost_axis(search) != "macs" or score_axis(search) != SCORE:
        return False
    ours = [value for result in results if (value := result.mean("macs")) is not None]
    scores = [value for result in results if (value := result.mean(SCORE)) is not None]
    printed = [row.macs / TABLE_6_IMAGES for row in ablation()]
    return bool(ours) and max(ours) > min(printed) / 2 and min(ours) < 2 * max(printed) and max(scores) > 0.6


def _write_labels(
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    size: float,
    lines: Sequence[tuple[float, float]] = (),
) -> None:
    """Writes each label next to its point. A label that would cover a point, a line or another label is left out."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    frame = axes.get_window_extent(renderer)
    label_boxes: list[Any] = []
    point_pixels = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    line_pixels = [axes.transData.transform(coordinates) for coordinates in lines]
    radius = 5 * figure.dpi / 72  # of a point: 5 typographic points in pixels
    for number, (x, y, text, color) in enumerate(points):
        for offset in LABEL_OFFSETS:
            side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
            label = axes.annotate(
                text, (x, y), xytext=offset, textcoords="offset points", fontsize=size, color=color, ha=side, zorder=5
            )
            label.set_in_layout(False)  # otherwise a label would shrink the axes
            box = label.get_window_extent(renderer)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            hits = any(box.overlaps(other) for other in label_boxes) or any(
                box.x0 - radius < px < box.x1 + radius and box.y0 - radius < py < box.y1 + radius
                for other, (px, py) in enumerate(point_pixels)
                if other != number
            )
            hits = hits or any(box.x0 < px < box.x1 and box.y0 < py < box.y1 for px, py in line_pixels)
            if inside and not hits:
                label_boxes.append(box)
                break
            label.remove()


def parallel_plot(search: Search, results: Sequence[PointResult], *, narrow: bool = False) -> Figure:
    """Plots one line per point, through its choices to its score and cost.

    Better points have stronger colors, and the best point is red.
    """
    shown = [result for result in results if result.mean(score_axis(search)) is not None]
    dimensions = list(search.space.by_key().dimensions)
    names = list(dict.fromkeys([score_axis(search), cost_axis(search)]))
    width = 4.3 if narrow else max(7.0, 1.9 * (len(dimensions) + len(names)) + 1)
    figure = _figure(width, 5.2)
    axes = figure.subplots()
    axes.set_axis_off()
    size = 7 if narrow else 8.5
    scales: list[_DimensionScale | _ValueScale] = [_DimensionScale(dimension, search.space) for dimension in dimensions]
    scales += [_ValueScale(name, shown) for name in names]
    for column, scale in enumerate(scales):
        axes.plot([column, column], [0, 1], color=RULE, lw=1.2, zorder=1)
        axes.text(column, 1.06, scale.title, ha="center", va="bottom", fontsize=size + 1, color=INK, weight="bold")
        is_last = column == len(scales) - 1  # the last axis has its labels on the right
        for height, text in scale.ticks():
            axes.text(
                column + (0.04 if is_last else -0.04), height, text, fontsize=size, color=INK,
                ha="left" if is_last else "right", va="center", zorder=6,
                bbox={"facecolor": PAGE, "edgecolor": "none", "pad": 0.6, "alpha": 0.75},
            )  # fmt: skip
    for rank, result in reversed(list(enumerate(shown))):
        strength = 1 - rank / max(1, len(shown))
        # lines of points with the same choice are moved apart by up to 3 % of the axis, to be visible side by side
        offset = (rank / max(1, len(shown) - 1) - 0.5) * 0.03 if len(shown) > 1 else 0.0
        heights = [scale.height(result, offset) for scale in scales]
        style = "-" if result.state == "finished" else (0, (4, 3))
        axes.plot(
            range(len(scales)), heights, ls=style, color=BEST if rank == 0 else ACCENT,
            lw=2.4 if rank == 0 else 1.2, alpha=1.0 if rank == 0 else 0.25 + 0.55 * strength,
            zorder=5 if rank == 0 else 3,
        )  # fmt: skip
    axes.set_xlim(-0.75, len(scales) - 1 + 0.45)
    axes.set_ylim(-0.08, 1.15)
    note = "red: the best; dashed: stopped early"
    axes.text(0.0, -0.06, note, transform=axes.transAxes, fontsize=size, color=MUTED, va="top")
    return figure


class _DimensionScale:
    """The axis of a dimension: evenly spaced choices, or a range. Heights are from 0 to 1."""

    def __init__(self, dimension: Dimension, space: Space) -> None:
        self.dimension, self.space, self.title = dimension, space, short(dimension.key)

    def _choice_height(self, choice: Any) -> float:
        dimension = self.dimension
        if not dimension.is_range:
            last = len(dimension.labels) - 1
            return dimension.labels.index(choice) / last if last else 0.5
        numbers = (dimension.low, dimension.high, choice)
        low, high, value = (math.log(number) if dimension.log else float(number) for number in numbers)
        return (value - low) / (high - low)

    def height(self, result: PointResult, offset: float) -> float:
        """The height of a point's choice; listed choices are moved by `offset`, while numbers in a range stay exact."""
        choice = self.space.point_by_key(result.point)[self.dimension.key]
        return self._choice_height(choice) + (0.0 if self.dimension.is_range else offset)

    def ticks(self) -> list[tuple[float, str]]:
        """(height, label) of every choice, or of both ends and the middle of a range."""
        dimension = self.dimension
        if not dimension.is_range:
            return [(self._choice_height(label), label) for label in dimension.labels]
        low, high = dimension.low, dimension.high
        middle = math.sqrt(low * high) if dimension.log else (low + high) / 2
        ends = dimension.ends()
        return [(self._choice_height(value), f"{value:.3g}") for value in (ends[0], middle, ends[1])]


class _ValueScale:
    """The axis of a score or cost. Its smallest value has the height 0 and its largest the height 1."""

    def __init__(self, name: str, shown: Sequence[PointResult]) -> None:
        self.name, self.title = name, head(name)
        values = [value for result in shown if (value := result.mean(name)) is not None] or [0.0]
        self.low, self.high = min(values), max(values)

    def height(self, result: PointResult, offset: float) -> float:
        """The height of a point's value; `offset` is not used, because values stay exact."""
        value = result.mean(self.name)
        if value is None or self.high == self.low:
            return 0.5
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """(height, label) of five evenly spaced values."""
        unit = UNITS.get(self.name, 1)
        values = [self.low + (self.high - self.low) * share for share in (0, 0.25, 0.5, 0.75, 1)]
        if self.low == self.high:
            return [(0.5, f"{self.low / unit:.3g}")]
        return [(share / 4, f"{value / unit:.3g}") for share, value in enumerate(values)]


def _style_axes(axes: Axes) -> None:
    axes.set_facecolor(PAGE)
    axes.grid(True, color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=PNG_DPI, facecolor=PAGE)
    return data.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element with CSS variables as colors; a page needs a different `name` for each figure.

    Matplotlib derives the ids in the element from the name.
    """
    import matplotlib

    data = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
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
