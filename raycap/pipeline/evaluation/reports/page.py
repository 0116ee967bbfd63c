"""The report of a run: one self-contained HTML file with scores, training curves and a gallery of captions."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from raycap.models.config import Values
from raycap.pipeline.config.languages import ENGLISH
from raycap.pipeline.data.images import BadImage, decode_image, read_image_file
from raycap.pipeline.evaluation.confidence import Quality
from raycap.pipeline.evaluation.reports.tables import UNAVAILABLE, Table
from raycap.pipeline.storage.path import StoragePath, storage_path

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_PIXELS = 200_000_000  # larger pictures are not decoded and get a placeholder
JPEG_QUALITY = 82
THUMBNAIL = 256  # the longer side of a picture on the page, in pixels
SMALL = 128  # a picture with both sides below this number of pixels is enlarged without interpolation
MAX_IMAGES = 200  # a page shows at most this many pictures
MAX_POINTS = 240  # a line of a chart has at most this many points
SCORE_NAME = "CIDEr-D"
Ticks = list[tuple[float, str]]  # positions on an axis in percent, with their labels


@dataclass(frozen=True)
class ReportImage:
    """One picture of the gallery.

    path: the picture's file (on S3 a StoragePath) or its bytes. key: the file's content key, or None if it is unknown.
    score: CIDEr-D of the caption, or None if there is none. alternatives: other captions by name, for example those of
    another model. contrast: how much the scores of the caption and its alternatives differ. If images have a contrast,
    the gallery is sorted by contrast.
    """

    image_id: int | str
    path: StoragePath | Path | bytes
    caption: str
    references: list[str]
    score: float | None
    split: str
    alternatives: dict[str, str] = field(default_factory=dict)
    contrast: float | None = None
    key: str | None = None

    @property
    def finite_score(self) -> float | None:
        """The score, or None if it is missing or not finite."""
        return self.score if self.score is not None and math.isfinite(self.score) else None


@dataclass(frozen=True)
class ReportStage:
    """One training stage. curves: for each metric the points (global step, value). summary: short texts by name."""

    name: str
    curves: dict[str, list[tuple[int, float]]]
    summary: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The content of the page.

    score_rows: (label, one cell per column). The part of a label after a newline is a note in small type ("ExpansionNet
    v2, single model\\nnot comparable: other data"). A cell that starts with "unavailable" is explained below the table.
    metadata: short texts about the run, by name. language: the language of the captions. tables: further tables below
    the scores. gallery_note: a line above the pictures. confidence: {split: quality of the confidence}.
    """

    title: str
    run_id: str
    protocol: str
    score_columns: list[str]
    score_rows: list[tuple[str, list[str]]]
    stages: list[ReportStage]
    images: list[ReportImage]
    metadata: dict[str, str]
    language: str = ENGLISH
    tables: Sequence[Table] = ()
    gallery_note: str = ""
    confidence: Mapping[str, Quality] = field(default_factory=dict)


def report_html(report: Report) -> str:
    """The HTML of the page.

    If there are more than MAX_IMAGES pictures, the gallery shows the worst, the best and random ones, a third each, and
    a note says so. A picture that cannot be read gets a placeholder with the reason.
    """
    reasons = [_reason(cell) for _, cells in report.score_rows for cell in cells]
    images, counts = choose_images(report.images, MAX_IMAGES, seed=report.run_id)
    html = render_template(
        TEMPLATE,
        report=report,
        score_name=SCORE_NAME,
        reason_of=_reason,
        reasons=list(dict.fromkeys(filter(None, reasons))),  # each reason once, in the order of the table
        stages=[(stage, _curves(stage)) for stage in report.stages],
        confidence=[(split, each, *_confidence_charts(each)) for split, each in report.confidence.items()],
        cards=_cards(images, seed=report.run_id),
        counts=counts,
    )
    # The page's security policy names the digest of its script, so browsers execute no other script.
    script = html.split("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return html.replace("SCRIPT_DIGEST", digest, 1)


def render_template(path: Path, **values: Any) -> str:
    """The text of an HTML template with escaped values. Raises jinja2.UndefinedError for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=True,  # because captions and names are untrusted text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name).render(**values)


def choose_images(
    images: Sequence[ReportImage], max_images: int, *, seed: str
) -> tuple[list[ReportImage], dict[str, int]]:
    """Chooses the gallery's pictures. Returns them in the given order, with the numbers of worst, best and random ones.

    The numbers are {} if the gallery has all pictures. The random choice depends on `seed` only. Pictures without a
    score are neither worst nor best.
    """
    if len(images) <= max_images:
        return list(images), {}
    scored = [(image.finite_score, index) for index, image in enumerate(images) if image.finite_score is not None]
    ranked = [index for _, index in sorted(scored)]
    third = min(max_images // 3, len(ranked) // 2)  # at most half of them, so no picture is both worst and best
    extremes = {*ranked[:third], *ranked[len(ranked) - third :]}
    rest = [index for index in range(len(images)) if index not in extremes]
    at_random = random.Random(seed).sample(rest, min(len(rest), max_images - 2 * third))
    chosen = [images[index] for index in sorted([*extremes, *at_random])]
    return chosen, {"worst": third, "best": third, "random": len(at_random)}


def _reason(cell: str) -> str:
    """The reason why a cell of the score table has no value, or "" if it has one."""
    if not cell.startswith(UNAVAILABLE):
        return ""
    return cell.removeprefix(UNAVAILABLE).lstrip(" :") or "no reason given"


@dataclass(frozen=True)
class Chart:
    """A line chart for the template. Positions are percentages of the plot's width, and of its height from the top.

    lines: each a list of points (x, y). The reader can select the points of the first line by pointer or keys. The
    other lines are thin. readings: the texts of each point of the first line, such as ("step 1,200", value).
    """

    name: str
    lines: list[list[tuple[float, float]]]
    readings: list[tuple[str, str]]
    x_ticks: Ticks
    y_ticks: Ticks

    @property
    def points(self) -> list[tuple[float, float, str, str]]:
        """The points that can be selected, as (x, y, text of the position, text of the value)."""
        return [(*position, *texts) for position, texts in zip(self.lines[0], self.readings, strict=True)]


def make_chart(
    name: str, lines: Sequence[Sequence[tuple[float, float]]], readings: Sequence[tuple[str, str]], unit: str = ""
) -> Chart:
    """A chart of lines with points (x, y). The first line must not be empty. unit: of both axes. See `Chart`."""
    points = np.array([point for line in lines for point in line], float)
    (left, bottom), (right, top) = points.min(0).tolist(), points.max(0).tolist()
    margin = (top - bottom) * 0.06 or abs(bottom) * 0.1 or 1.0  # above 0, also if all values are equal
    bottom = 0.0 if 0 <= bottom <= 0.25 * top else bottom - margin
    top += margin

    def across(value: float) -> float:
        return round(100 * (value - left) / (right - left), 2) if right > left else 50.0

    def down(value: float) -> float:
        return round(100 * (top - value) / (top - bottom), 2)

    steps = [value for value in round_values(left, right, 3) if value == int(value)] if right > left else [left]
    return Chart(
        name=name,
        lines=[[(across(x), down(y)) for x, y in line] for line in lines],
        readings=list(readings),
        x_ticks=[(across(value), f"{value:,.0f}{unit}") for value in steps],
        y_ticks=[(down(value), format_number(value) + unit) for value in round_values(bottom, top, 4)],
    )


def _curves(stage: ReportStage) -> list[Chart]:
    """The charts of a stage's curves that have finite values."""
    charts = [curve(name, series) for name, series in stage.curves.items()]
    return [chart for chart in charts if chart is not None]


def curve(name: str, series: Sequence[tuple[int, float]]) -> Chart | None:
    """The chart of a series of (step, value), thinned to MAX_POINTS points, or None if no value is finite."""
    finite = sorted(point for point in series if math.isfinite(point[1]))
    if not finite:
        return None
    indices = np.linspace(0, len(finite) - 1, min(len(finite), MAX_POINTS)).astype(int)
    shown = [finite[index] for index in indices]
    return make_chart(name, [shown], [(f"step {step:,}", format_number(value)) for step, value in shown])


def _confidence_charts(quality: Quality) -> tuple[Chart, Chart]:
    """Two charts: the share of bad captions over the coverage, and the share of good captions over the confidence.

    The thin line of the second chart is the diagonal.
    """
    risks = [(100 * each.coverage, 100 * each.risk) for each in quality.risks]
    readings = [(f"coverage {each.coverage:.0%}", f"{each.risk:.1%}") for each in quality.risks]
    risk = make_chart("not good, by coverage", [risks], readings, " %")
    bins = [(100 * each.confidence, 100 * each.good) for each in quality.bins]
    texts = [
        (f"confidence {each.confidence:.1%}", f"{each.good:.1%} good of {each.num_images}") for each in quality.bins
    ]
    return risk, make_chart("good, by confidence", [bins, [(0.0, 0.0), (100.0, 100.0)]], texts, " %")


def format_number(value: float) -> str:
    """The number as a short text, with an exponent if it is very small or large: 0.0015, 12,345, 2e-05."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:z.4g}"  # z turns -0 into 0


def round_values(low: float, high: float, about: int) -> list[float]:
    """About `about` round values in [low, high], at distances of 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
    # Without 1e-9, rounding errors could remove a value at an end of the range.
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [float(f"{index * distance:.12g}") for index in range(first, last + 1)]


def _cards(images: Sequence[ReportImage], *, seed: str) -> list[Values]:
    """The template's values for each picture, sorted by score, the lowest first. Pictures without a score are last."""
    positions = random.Random(seed).sample(range(len(images)), len(images))  # each picture's place in a random order
    with ThreadPoolExecutor(8) as pool:  # 8 at a time, because requests to S3 mostly wait
        thumbnails = list(pool.map(_thumbnail, images))
    cards: list[Values] = [
        {"image": image, "score": image.finite_score, "thumbnail": thumbnail, "position": position}
        for image, position, thumbnail in zip(images, positions, thumbnails, strict=True)
    ]
    return sorted(cards, key=lambda card: (card["score"] is None, card["score"] or 0.0))


def _thumbnail(image: ReportImage) -> Values:
    """A picture as a small JPEG {"uri": data URI, "width", "height", "is_small"}, or {"problem": why it fails}."""
    try:
        data = image.path if isinstance(image.path, bytes) else read_image_file(storage_path(image.path), image.key)
        picture = decode_image(data, MAX_PIXELS)
    except BadImage as error:
        return {"problem": str(error)}
    except OSError as error:
        return {"problem": error.strerror or "cannot be read"}
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Small pictures are synthetic and have sharp edges, so they keep the full color resolution. Others keep half of it.
    is_small = max(picture.size) < SMALL
    quality, subsampling = (97, 0) if is_small else (JPEG_QUALITY, 2)
    picture.save(buffer, "JPEG", quality=quality, subsampling=subsampling, optimize=True)
    uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"uri": uri, "width": picture.width, "height": picture.height, "is_small": is_small}
