"""Geometry of the report's charts: scales, ticks, smoothing and SVG paths, from plain numbers.

Everything is in percent of the plot's box (x to the right, y downwards), so that the page can stretch the lines and
keep text and stroke widths as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Series = Sequence[tuple[int, float]]

SMOOTH_ABOVE = 50  # values of a stage from which on a running mean may be drawn over the faint raw line
NOISY_ABOVE = 4.0  # and it is drawn where the line's ups and downs add up to more than so many times its range
DOTS_UP_TO = 30  # values of a stage up to which each is marked by a dot
MOST_POINTS = 240  # values a line is thinned to: more than a chart has pixels to show
LOG_ABOVE = 100.0  # highest / lowest from which on the scale is logarithmic
PADDING = 0.06  # of the value range, above and below


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Band:
    """One stage of an overview: where it lies (percent), its name, its last step."""

    left: float
    width: float
    name: str
    steps: str


@dataclass(frozen=True)
class Plot:
    """A chart ready to be drawn. `points` are (x, y, "step 1,200", value) for hovering and keys, in drawing order."""

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
    """Three or four significant digits, without an exponent where that reads well: 0.0015, 12,345, 2e-5."""
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
    """The chart of one metric in one stage; None when it holds no finite value."""
    return _plot(name, [("", series)])


def overview_plot(name: str, stages: Sequence[tuple[str, Series]]) -> Plot | None:
    """One metric over all stages, each of the same width: a short fine-tuning would vanish beside a long stage."""
    return _plot(name, stages)


def _plot(name: str, stages: Sequence[tuple[str, Series]]) -> Plot | None:
    given = sum(len(series) for _, series in stages)
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
        left, inner = index * width, width
        if len(finite) > 1:
            bands.append(Band(left, width, stage, f"{series[0][0]:,} to {series[-1][0]:,}"))
            left, inner = left + 0.04 * width, 0.92 * width  # a gap, so that no line seems to cross stages
        window = max(5, len(series) // 16) | 1 if is_noisy(series) else 1
        windows.append(window)
        smooth = thin(running_mean(series, window))
        placed = _place(smooth, scale, left, inner, series)
        points += [(*at, f"step {step:,}", number(value)) for at, (step, value) in zip(placed, smooth, strict=True)]
        lines.append(_path(placed))
        if window > 1:
            raws.append(_path(_place(thin(series), scale, left, inner, series)))
    notes = [scale.note, f"line: mean of {max(windows)} values" if max(windows) > 1 else ""]
    notes.append(f"{given - len(values)} of {given} values not finite" if given > len(values) else "")
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
    """Whether a running mean helps: long, and up and down all the time. A learning rate's steps stay sharp."""
    if len(series) <= SMOOTH_ABOVE:
        return False
    values = [value for _, value in series]
    travel = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return travel > NOISY_ABOVE * (max(values) - min(values))


def running_mean(series: Series, window: int) -> list[tuple[int, float]]:
    """Mean over `window` values (odd) around each; at the ends over those of them that there are."""
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


def thin(series: Series, most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most `most` values: of equal runs the lowest and the highest (spikes stay), and always first and last."""
    if len(series) <= most:
        return list(series)
    runs = (most - 2) // 2
    kept = {0, len(series) - 1}
    for run in range(runs):
        members = range(run * len(series) // runs, (run + 1) * len(series) // runs)
        kept.add(min(members, key=lambda index: series[index][1]))
        kept.add(max(members, key=lambda index: series[index][1]))
    return [series[index] for index in sorted(kept)]


class _Scale:
    """Values to percent from the top; logarithmic where they span more than two orders of magnitude."""

    def __init__(self, low: float, high: float) -> None:
        self.log = low > 0 and high / low >= LOG_ABOVE
        self.note = "log scale" if self.log else ""
        if self.log:
            low, high = math.log10(low), math.log10(high)
        margin = (high - low) * PADDING or abs(low) * 0.1 or 1.0
        # A scale that would start close to zero starts at zero: the height of the line then means its value.
        floor = not self.log and 0 <= low <= 0.25 * high
        self.low, self.high = (0.0 if floor else low - margin), high + margin

    def at(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return 100 * (self.high - value) / (self.high - self.low)

    def ticks(self) -> list[Tick]:
        if not self.log:
            return [Tick(round(self.at(value), 2), number(value)) for value in nice_values(self.low, self.high, 4)]
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        every = max(1, len(powers) // 4)
        values = [10.0**power for power in powers if self.low <= power <= self.high and power % every == 0]
        return [Tick(round(self.at(value), 2), number(value)) for value in values]


def nice_values(low: float, high: float, about: int) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high], `about` in number."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    return [index * apart for index in range(first, last + 1)]


def _step_ticks(first: int, last: int) -> list[Tick]:
    if last == first:
        return [Tick(50.0, f"{first:,}")]
    values = [value for value in nice_values(first, last, 3) if value == int(value)]
    return [Tick(round(100 * (value - first) / (last - first), 2), f"{int(value):,}") for value in values]


def _place(points: Series, scale: _Scale, left: float, width: float, series: Series) -> list[tuple[float, float]]:
    """Points in percent of the box, the whole series filling `width`; a lone step stands in the middle."""
    first, span = series[0][0], series[-1][0] - series[0][0]
    return [
        (round(left + width * ((step - first) / span if span else 0.5), 2), round(scale.at(value), 2))
        for step, value in points
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """SVG path data; a single point becomes a short dash, so that it is seen."""
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
    """A round width with which 24 bins at most reach `highest`."""
    widths = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)
    return next((width for width in widths if highest / width < 24), highest / 20)


def histogram(name: str, scores: Sequence[float], highest: float) -> Histogram:
    """Counts of scores from 0 to `highest` (shared by several histograms, so that they can be compared)."""
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
