"""The picture of two scores of interpolated models: all points, the Pareto front, and the chord between the members."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from raycap.pipeline.evaluation.comparison.front import Point, ends, pareto_front

INK, MUTED, RULE, ACCENT, BEST = "#14201c", "#52605a", "#d5dcd9", "#0b6b58", "#b5401f"
OFFSET = 7  # of a label from its point in both directions, in typographic points


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
