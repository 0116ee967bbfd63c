"""The charts of a confidence: the risk at each coverage with its interval, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Sequence

from raycap.pipeline.evaluation.confidence.quality import Quality
from raycap.pipeline.evaluation.reports.charts import DOTS_UP_TO, Line, Plot, Ticks, choose_round_values, format_number

PERCENT_TICKS = tuple(range(0, 101, 25))


def risk_plot(quality: Quality) -> Plot:
    """The share of captions that are not good over the coverage. The thin lines are the ends of the interval."""
    highest = max(each.high for each in quality.risks) or 1.0
    lines = [
        [_place(each.coverage, value / highest) for each, value in zip(quality.risks, values, strict=True)]
        for values in zip(*((each.risk, each.low, each.high) for each in quality.risks), strict=True)
    ]
    readings = [
        (f"coverage {each.coverage:.0%}", f"{each.risk:.1%} ({each.low:.1%} to {each.high:.1%})")
        for each in quality.risks
    ]
    values = choose_round_values(0.0, 100 * highest, 4)
    ticks = [(round(100 - value / highest, 2), f"{format_number(value)} %") for value in values]
    return _plot("not good, by coverage", lines[0], lines[1:], readings, ticks)


def reliability_plot(quality: Quality) -> Plot:
    """The share of good captions over the confidence, for each bin. The thin line is the diagonal."""
    line = [_place(each.confidence, each.good) for each in quality.bins]
    readings = [
        (f"confidence {each.confidence:.1%}", f"{each.good:.1%} good of {each.num_images}") for each in quality.bins
    ]
    ticks = [(float(100 - percent), f"{percent} %") for percent in PERCENT_TICKS]
    return _plot("good, by confidence", line, [[(0.0, 100.0), (100.0, 0.0)]], readings, ticks)


def _place(across: float, up: float) -> tuple[float, float]:
    """The position in percent of a point whose coordinates are shares."""
    return round(100 * across, 2), round(100 * (1 - up), 2)


def _plot(name: str, line: Line, thin: list[Line], readings: Sequence[tuple[str, str]], y_ticks: Ticks) -> Plot:
    """A chart whose horizontal axis is a share. readings: (where, value) of each point of the line."""
    points = [(x, y, *texts) for (x, y), texts in zip(line, readings, strict=True)]
    return Plot(
        name=name,
        lines=[line],
        raw_lines=thin,
        points=points,
        dots=len(points) <= DOTS_UP_TO,
        x_ticks=[(float(percent), f"{percent} %") for percent in PERCENT_TICKS],
        y_ticks=y_ticks,
        bands=[],
        last=readings[-1][1],
        note="",
        summary=f"{name}, {len(points)} points: " + "; ".join(f"{where}: {value}" for where, value in readings),
    )
