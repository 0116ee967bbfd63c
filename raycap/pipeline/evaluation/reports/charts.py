"""Geometry of the report's interactive charts: scales, ticks, smoothing and lines; curves, histograms and confidences.

Coordinates are percentages of the plot's width (x, to the right) and height (y, downwards), so that the page can
stretch the lines without stretching text and strokes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raycap.pipeline.evaluation.confidence.confidence import Quality

Series = Sequence[tuple[int, float]]
Line = list[tuple[float, float]]
Ticks = list[tuple[float, str]]  # positions on an axis in percent, with their labels

SMOOTH_ABOVE = 50  # a series with more values than this is smoothed if it is noisy
NOISY_ABOVE = 4.0  # a series is noisy when its total variation is more than this many times its range
DOTS_UP_TO = 30  # a series with at most this many values shows each value as a dot
MAX_POINTS = 240  # a line has at most this many points; a chart has too few pixels for more
LOG_ABOVE = 100.0  # the scale is logarithmic when the highest value is at least this many times the lowest
PADDING = 0.06  # the scale extends the range of values by this share at both ends
PERCENT_TICKS = tuple(range(0, 101, 25))


@dataclass(frozen=True)
class Plot:
    """A chart for the template.

    lines, raw_lines: one line of (x, y) per stage; raw lines show the values of smoothed stages. points: (x, y, "step
    1,200", value); the reader selects one by pointer or keys. dots: whether each point is shown as a dot. bands: (left,
    width, name, range of steps) of each stage, for a chart of several stages. last: the last value. note: a line below
    the chart. summary: a description for screen readers.
    """

    name: str
    lines: list[Line]
    raw_lines: list[Line]
    points: list[tuple[float, float, str, str]]
    dots: bool
    x_ticks: Ticks
    y_ticks: Ticks
    bands: list[tuple[float, float, str, str]]
    last: str
    note: str
    summary: str


def format_number(value: float) -> str:
    """Three or four significant digits, with an exponent for very small and large values: 0.0015, 12,345, 2e-5."""
    size = abs(value)
    if 1000 <= size < 1e6:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= size < 1000:
        return f"{value:z.4g}"  # z: negative zero is 0
    digits, _, power = f"{value:.3g}".partition("e")
    return f"{digits}e{int(power)}" if power else digits


def make_plot(name: str, stages: Sequence[tuple[str, Series]]) -> Plot | None:
    """The chart of one metric over stages (name, series); None when no value is finite.

    Stages have the same width, so that a short fine-tuning remains visible.
    """
    finite = [(stage, sorted(point for point in series if math.isfinite(point[1]))) for stage, series in stages]
    finite = [(stage, series) for stage, series in finite if series]
    if not finite:
        return None
    values = [value for _, series in finite for _, value in series]
    scale = _Scale(min(values), max(values))
    points: list[tuple[float, float, str, str]] = []
    lines, raw_lines, bands, longest_window = [], [], [], 1
    stage_width = 100 / len(finite)
    for index, (stage, series) in enumerate(finite):
        left, width = index * stage_width, stage_width
        if len(finite) > 1:
            bands.append((left, width, stage, f"{series[0][0]:,} to {series[-1][0]:,}"))
            left, width = left + 0.04 * width, 0.92 * width  # a gap between stages
        window = _smoothing_window(series)
        longest_window = max(longest_window, window)
        smooth = thin(running_mean(series, window))
        lines.append(_place_points(smooth, scale, left, width, series))
        points += [
            (x, y, f"step {s:,}", format_number(value)) for (x, y), (s, value) in zip(lines[-1], smooth, strict=True)
        ]
        if window > 1:
            raw_lines.append(_place_points(thin(series), scale, left, width, series))
    num_values = sum(len(series) for _, series in stages)
    (_, first_series), (_, last_series) = finite[0], finite[-1]
    (first_step, first_value), (last_step, last_value) = first_series[0], last_series[-1]
    return Plot(
        name=name,
        lines=lines,
        raw_lines=raw_lines,
        points=points,
        dots=len(points) <= DOTS_UP_TO * len(finite),
        x_ticks=_make_step_ticks(first_step, last_step) if len(finite) == 1 else [],
        y_ticks=scale.make_ticks(),
        bands=bands,
        last=format_number(last_value),
        note=_make_note(scale, longest_window, num_values, num_finite=len(values)),
        summary=f"{name}, {len(values)} values up to step {last_step:,}: first {format_number(first_value)}, "
        f"last {format_number(last_value)}, lowest {format_number(min(values))}, highest {format_number(max(values))}",
    )


def _smoothing_window(series: Series) -> int:
    """The odd number of values over which a series is averaged: about a sixteenth of a noisy series, otherwise 1."""
    if not is_noisy(series):
        return 1
    window = max(5, len(series) // 16)
    return window if window % 2 else window + 1


def _make_note(scale: _Scale, longest_window: int, num_values: int, num_finite: int) -> str:
    """The line below a chart: its scale, its smoothing and the number of values that it cannot show."""
    notes = [
        "log scale" if scale.log else "",
        f"line: mean of {longest_window} values" if longest_window > 1 else "",
        f"{num_values - num_finite} of {num_values} values not finite" if num_values > num_finite else "",
    ]
    return "; ".join(filter(None, notes))


def is_noisy(series: Series) -> bool:
    """Whether to smooth a series, because it is long and rises and falls often. A learning rate is not noisy."""
    values = [value for _, value in series]
    return len(values) > SMOOTH_ABOVE and bool(np.abs(np.diff(values)).sum() > NOISY_ABOVE * np.ptp(values))


def running_mean(series: Series, window: int) -> list[tuple[int, float]]:
    """The mean over `window` (odd) values around each value; near the ends the mean is over fewer values."""
    if window <= 1:
        return list(series)
    sums = np.cumsum([0.0, *(value for _, value in series)])
    index = np.arange(len(series))
    first, end = np.maximum(0, index - window // 2), np.minimum(len(series), index + window // 2 + 1)
    means = (sums[end] - sums[first]) / (end - first)
    return [(step, mean) for (step, _), mean in zip(series, means.tolist(), strict=True)]


def thin(series: Series, limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most `limit` values: the first, the last, and the lowest and highest of runs of equal length."""
    if len(series) <= limit:
        return list(series)
    runs = (limit - 2) // 2
    positions = {0, len(series) - 1}
    for run in range(runs):
        members = range(run * len(series) // runs, (run + 1) * len(series) // runs)
        positions.add(min(members, key=lambda index: series[index][1]))
        positions.add(max(members, key=lambda index: series[index][1]))
    return [series[index] for index in sorted(positions)]


class _Scale:
    """Converts values to percent from the top. It is logarithmic when values differ by a factor of LOG_ABOVE."""

    def __init__(self, low: float, high: float) -> None:
        self.log = low > 0 and high / low >= LOG_ABOVE
        if self.log:
            low, high = math.log10(low), math.log10(high)
        # Equal values have no range: the scale then extends by a tenth of the value, or by 1 around zero.
        margin = (high - low) * PADDING or abs(low) * 0.1 or 1.0
        # A scale that would start close to zero starts at zero, so that heights are proportional to values.
        from_zero = not self.log and 0 <= low <= 0.25 * high
        self.low, self.high = (0.0 if from_zero else low - margin), high + margin

    def position(self, value: float) -> float:
        """The distance of a value from the top of the chart, in percent of its height."""
        value = math.log10(value) if self.log else value
        return 100 * (self.high - value) / (self.high - self.low)

    def make_ticks(self) -> Ticks:
        """About four round values, or powers of ten on a logarithmic scale, with their positions."""
        values = choose_round_values(self.low, self.high, 4)
        if self.log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            every = max(1, len(powers) // 4)
            values = [10.0**power for power in powers if self.low <= power <= self.high and power % every == 0]
        return [(round(self.position(value), 2), format_number(value)) for value in values]


def choose_round_values(low: float, high: float, about: int) -> list[float]:
    """About `about` round values in [low, high], at distances of 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
    # 1e-9 keeps a value at an end of the range in spite of rounding errors.
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [index * distance for index in range(first, last + 1)]


def _make_step_ticks(first: int, last: int) -> Ticks:
    """About three round steps with their positions on an axis from `first` to `last`."""
    if last == first:
        return [(50.0, f"{first:,}")]
    values = [value for value in choose_round_values(first, last, 3) if value == int(value)]
    return [(round(100 * (value - first) / (last - first), 2), f"{int(value):,}") for value in values]


def _place_points(points: Series, scale: _Scale, left: float, width: float, series: Series) -> Line:
    """Positions of points in percent. The steps of the whole `series` fill `width`; a single step is in the middle."""
    first, span = series[0][0], series[-1][0] - series[0][0]
    return [
        (round(left + width * ((step - first) / span if span else 0.5), 2), round(scale.position(value), 2))
        for step, value in points
    ]


@dataclass(frozen=True)
class Histogram:
    """Bin i counts the scores in [edges[i], edges[i + 1])."""

    name: str
    counts: list[int]
    edges: list[float]
    ticks: Ticks
    mean: str
    median: str


def make_histogram(name: str, scores: Sequence[float], highest: float) -> Histogram:
    """A histogram of scores from 0 to `highest` with at most 24 bins of a round width.

    Histograms to compare must have the same `highest`.
    """
    widths = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)
    width = next((width for width in widths if highest / width < 24), highest / 20)
    # 1e-9 keeps a score at the edge of two bins in the upper one in spite of rounding errors.
    num_bins = max(1, math.floor(highest / width + 1e-9) + 1)
    positions = np.floor(np.array(scores) / width + 1e-9).astype(int).clip(0, num_bins - 1)
    edges = [round(index * width, 4) for index in range(num_bins + 1)]
    labeled = range(0, num_bins + 1, max(1, math.ceil(num_bins / 8)))
    return Histogram(
        name=name,
        counts=np.bincount(positions, minlength=num_bins).tolist(),
        edges=edges,
        ticks=[(round(100 * index / num_bins, 2), format_number(edges[index])) for index in labeled],
        mean=f"{statistics.fmean(scores):.3f}",
        median=f"{statistics.median(scores):.3f}",
    )


def risk_plot(quality: Quality) -> Plot:
    """The share of captions that are not good over the coverage. The thin lines are the ends of the interval."""
    highest = max(each.high for each in quality.risks) or 1.0
    lines = [
        [_place_shares(each.coverage, value / highest) for each, value in zip(quality.risks, values, strict=True)]
        for values in zip(*((each.risk, each.low, each.high) for each in quality.risks), strict=True)
    ]
    readings = [
        (f"coverage {each.coverage:.0%}", f"{each.risk:.1%} ({each.low:.1%} to {each.high:.1%})")
        for each in quality.risks
    ]
    values = choose_round_values(0.0, 100 * highest, 4)
    ticks = [(round(100 - value / highest, 2), f"{format_number(value)} %") for value in values]
    return _plot_over_share("not good, by coverage", lines[0], lines[1:], readings, ticks)


def reliability_plot(quality: Quality) -> Plot:
    """The share of good captions over the confidence, for each bin. The thin line is the diagonal."""
    line = [_place_shares(each.confidence, each.good) for each in quality.bins]
    readings = [
        (f"confidence {each.confidence:.1%}", f"{each.good:.1%} good of {each.num_images}") for each in quality.bins
    ]
    ticks = [(float(100 - percent), f"{percent} %") for percent in PERCENT_TICKS]
    return _plot_over_share("good, by confidence", line, [[(0.0, 100.0), (100.0, 0.0)]], readings, ticks)


def _place_shares(across: float, up: float) -> tuple[float, float]:
    """The position in percent of a point whose coordinates are shares."""
    return round(100 * across, 2), round(100 * (1 - up), 2)


def _plot_over_share(
    name: str, line: Line, thin: list[Line], readings: Sequence[tuple[str, str]], y_ticks: Ticks
) -> Plot:
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
