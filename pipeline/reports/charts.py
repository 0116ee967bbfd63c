"""Geometry of the report's interactive charts: scales, ticks, smoothing and SVG paths.

Coordinates are percentages of the plot's width (x, to the right) and height (y, downwards), so that the page can
stretch the lines without stretching text and strokes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Series = Sequence[tuple[int, float]]

SMOOTH_ABOVE = 50  # a series with more values than this is smoothed if it is noisy
NOISY_ABOVE = 4.0  # a series is noisy when its total variation is more than this many times its range
DOTS_UP_TO = 30  # a series with at most this many values shows each value as a dot
MAX_POINTS = 240  # a line has at most this many points; a chart has too few pixels for more
LOG_ABOVE = 100.0  # the scale is logarithmic when the highest value is at least this many times the lowest
PADDING = 0.06  # the scale extends the range of values by this share at both ends


@dataclass(frozen=True)
class Tick:
    """A labeled position on an axis, in percent."""

    at: float
    label: str


@dataclass(frozen=True)
class Band:
    """One stage of an overview: its position in percent, its name, its range of steps."""

    left: float
    width: float
    name: str
    steps: str


@dataclass(frozen=True)
class Plot:
    """A chart for the template. `points` are (x, y, "step 1,200", value); the reader selects one by pointer or keys."""

    name: str
    line: str
    raw: str
    points: list[tuple[float, float, str, str]]
    dots: bool
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bands: list[Band]
    last: str
    note: str
    summary: str


def number(value: float) -> str:
    """Three or four significant digits, with an exponent for very small and large values: 0.0015, 12,345, 2e-5."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def stage_plot(name: str, series: Series) -> Plot | None:
    """The chart of one metric in one stage; None when no value is finite."""
    return _plot(name, [("", series)])


def overview_plot(name: str, stages: Sequence[tuple[str, Series]]) -> Plot | None:
    """One metric over all stages. Stages have the same width, so that a short fine-tuning remains visible."""
    return _plot(name, stages)


def _plot(name: str, stages: Sequence[tuple[str, Series]]) -> Plot | None:
    num_values = sum(len(series) for _, series in stages)
    finite = [(stage, [(step, value) for step, value in series if math.isfinite(value)]) for stage, series in stages]
    finite = [(stage, sorted(series)) for stage, series in finite if series]
    if not finite:
        return None
    values = [value for _, series in finite for _, value in series]
    scale = _Scale(min(values), max(values))
    width = 100 / len(finite)
    points: list[tuple[float, float, str, str]] = []
    lines, raws, bands, windows = [], [], [], []
    for index, (stage, series) in enumerate(finite):
        left, line_width = index * width, width
        if len(finite) > 1:
            bands.append(Band(left, width, stage, f"{series[0][0]:,} to {series[-1][0]:,}"))
            left, line_width = left + 0.04 * width, 0.92 * width  # a gap between stages
        window = max(5, len(series) // 16) | 1 if is_noisy(series) else 1
        windows.append(window)
        smooth = thin(running_mean(series, window))
        placed = _place(smooth, scale, left, line_width, series)
        points += [
            (*position, f"step {step:,}", number(value)) for position, (step, value) in zip(placed, smooth, strict=True)
        ]
        lines.append(_path(placed))
        if window > 1:
            raws.append(_path(_place(thin(series), scale, left, line_width, series)))
    notes = [scale.note, f"line: mean of {max(windows)} values" if max(windows) > 1 else ""]
    notes.append(f"{num_values - len(values)} of {num_values} values not finite" if num_values > len(values) else "")
    steps = (finite[0][1][0][0], finite[0][1][-1][0])
    last = finite[-1][1][-1]
    return Plot(
        name=name,
        line="".join(lines),
        raw="".join(raws),
        points=points,
        dots=len(points) <= DOTS_UP_TO * len(finite),
        x_ticks=_step_ticks(*steps) if len(finite) == 1 else [],
        y_ticks=scale.ticks(),
        bands=bands,
        last=number(last[1]),
        note="; ".join(note for note in notes if note),
        summary=f"{name}, {len(values)} values up to step {last[0]:,}: first {number(values[0])}, "
        f"last {number(last[1])}, lowest {number(min(values))}, highest {number(max(values))}",
    )


def is_noisy(series: Series) -> bool:
    """Whether to smooth a series, because it is long and rises and falls often. A learning rate is not noisy."""
    if len(series) <= SMOOTH_ABOVE:
        return False
    values = [value for _, value in series]
    variation = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return variation > NOISY_ABOVE * (max(values) - min(values))


def running_mean(series: Series, window: int) -> list[tuple[int, float]]:
    """The mean over `window` (odd) values around each value; near the ends the mean is over fewer values."""
    if window <= 1:
        return list(series)
    sums = [0.0]
    for _, value in series:
        sums.append(sums[-1] + value)
    result = []
    for index, (step, _) in enumerate(series):
        first, end = max(0, index - window // 2), min(len(series), index + window // 2 + 1)
        result.append((step, (sums[end] - sums[first]) / (end - first)))
    return result


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
        self.note = "log scale" if self.log else ""
        if self.log:
            low, high = math.log10(low), math.log10(high)
        # Equal values have no range: the scale then extends by a tenth of the value, or by 1 around zero.
        margin = (high - low) * PADDING or abs(low) * 0.1 or 1.0
        # A scale that would start close to zero starts at zero, so that heights are proportional to values.
        from_zero = not self.log and 0 <= low <= 0.25 * high
        self.low, self.high = (0.0 if from_zero else low - margin), high + margin

    def position(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return 100 * (self.high - value) / (self.high - self.low)

    def ticks(self) -> list[Tick]:
        if not self.log:
            return [
                Tick(round(self.position(value), 2), number(value)) for value in nice_values(self.low, self.high, 4)
            ]
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        every = max(1, len(powers) // 4)
        values = [10.0**power for power in powers if self.low <= power <= self.high and power % every == 0]
        return [Tick(round(self.position(value), 2), number(value)) for value in values]


def nice_values(low: float, high: float, about: int) -> list[float]:
    """About `about` round values in [low, high], at distances of 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [index * distance for index in range(first, last + 1)]


def _step_ticks(first: int, last: int) -> list[Tick]:
    if last == first:
        return [Tick(50.0, f"{first:,}")]
    values = [value for value in nice_values(first, last, 3) if value == int(value)]
    return [Tick(round(100 * (value - first) / (last - first), 2), f"{int(value):,}") for value in values]


def _place(points: Series, scale: _Scale, left: float, width: float, series: Series) -> list[tuple[float, float]]:
    """Positions in percent. The steps of `series` fill `width`; a single step is in the middle."""
    first, span = series[0][0], series[-1][0] - series[0][0]
    return [
        (round(left + width * ((step - first) / span if span else 0.5), 2), round(scale.position(value), 2))
        for step, value in points
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """SVG path data; a single point becomes a short, visible dash."""
    if len(points) == 1:
        x, y = points[0]
        points = [(x - 0.5, y), (x + 0.5, y)]
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


@dataclass(frozen=True)
class Bin:
    """Scores in [low, high); `height` in percent of the fullest bin."""

    low: float
    high: float
    count: int
    height: float


@dataclass(frozen=True)
class Histogram:
    name: str
    bins: list[Bin]
    edges: list[Tick]
    mean: str
    median: str
    count: int


def bin_width(highest: float) -> float:
    """A round width of bins, so that at most 24 bins cover 0 to `highest`."""
    widths = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)
    return next((width for width in widths if highest / width < 24), highest / 20)


def histogram(name: str, scores: Sequence[float], highest: float) -> Histogram:
    """A histogram of scores from 0 to `highest`. Histograms to compare must have the same `highest`."""
    width = bin_width(highest)
    bins = max(1, math.floor(highest / width + 1e-9) + 1)
    counts = [0] * bins
    for score in scores:
        counts[min(bins - 1, max(0, math.floor(score / width + 1e-9)))] += 1
    top = max(counts) or 1
    ordered = sorted(scores)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    every = max(1, math.ceil(bins / 8))
    return Histogram(
        name=name,
        bins=[
            Bin(round(i * width, 4), round((i + 1) * width, 4), n, round(100 * n / top, 1))
            for i, n in enumerate(counts)
        ],
        edges=[Tick(round(100 * i / bins, 2), number(round(i * width, 4))) for i in range(0, bins + 1, every)],
        mean=f"{sum(ordered) / len(ordered):.3f}",
        median=f"{median:.3f}",
        count=len(ordered),
    )
