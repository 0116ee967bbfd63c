"""The report of a run: one self-contained HTML file with scores, training curves and a gallery of captions."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline.data.images import BadImage, decode_image
from pipeline.data.vocabulary import tokenize
from pipeline.reports.charts import Histogram, Plot, histogram, overview_plot, stage_plot
from pipeline.reports.cluster_pictures import LayerColors, color_table
from pipeline.reports.text_table import UNAVAILABLE
from pipeline.storage.atomic import write_text
from pipeline.storage.path import StoragePath

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_PIXELS = 200_000_000  # a larger picture gets a placeholder
JPEG_QUALITY = 82
SMALL = 128  # a picture whose sides are shorter, in pixels, is enlarged without interpolation
MAX_IMAGES = 200  # a page shows at most this many pictures
SCORE_NAME = "CIDEr-D"


@dataclass(frozen=True)
class ReportImage:
    """One picture of the gallery.

    path: the picture's file (on S3 a StoragePath) or its bytes. score: CIDEr-D of the caption, or None. alternatives:
    other captions by name, for example those of earlier stages or of another model. attention (words, N): the attention
    of each word of the caption over a square grid of N image tokens. attribution (words, N): the contribution of each
    token to the word's log-probability. clusters: the clusters of patches and words in each layer.
    """

    image_id: int | str
    path: StoragePath | Path | bytes
    caption: str
    references: list[str]
    score: float | None
    split: str
    alternatives: dict[str, str] = field(default_factory=dict)
    attention: np.ndarray | None = None
    attribution: np.ndarray | None = None
    clusters: Sequence[LayerColors] = ()


@dataclass(frozen=True)
class ReportStage:
    """One training stage. `curves`: (global step, value) by metric. `summary`: short texts by name."""

    name: str
    curves: dict[str, list[tuple[int, float]]]
    summary: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The content of the page.

    score_rows: (label, one cell per column). The part of a label after a newline is a note in small type
    ("ExpansionNet v2, single model\\nnot comparable: other data"). A cell that starts with "unavailable" is explained
    below the table. metadata: short texts about the run, by name.
    """

    title: str
    run_id: str
    protocol: str
    score_columns: list[str]
    score_rows: list[tuple[str, list[str]]]
    stages: list[ReportStage]
    images: list[ReportImage]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Thumbnail:
    """A JPEG as a data URI with its size in pixels. Without a JPEG, `problem` is the reason."""

    uri: str
    width: int
    height: int
    problem: str = ""

    @property
    def small(self) -> bool:
        return max(self.width, self.height) < SMALL


@dataclass(frozen=True)
class Card:
    """The template's values for one picture. `position` is the picture's position in the shuffled order."""

    image: ReportImage
    score: float | None
    thumbnail: Thumbnail
    length: int
    difference: float
    position: int
    attention: str
    attribution: str
    clusters: list[dict[str, Any]]


def write_report(path: Path, report: Report, *, max_images: int = MAX_IMAGES, thumbnail: int = 256) -> None:
    """Writes the page to `path`. An existing page is replaced only by a complete one.

    With more than `max_images` pictures the gallery shows the worst, the best and random ones, a third each, with a
    note. thumbnail: the longer side of a picture in pixels. A picture that cannot be read gets a placeholder with the
    reason. Raises ValueError when a score row does not have one cell per column.
    """
    _check(report)
    chosen, counts = choose_images(report.images, max_images, seed=report.run_id)
    cards = _cards(chosen, thumbnail, seed=report.run_id)
    score_rows, reasons = _score_rows(report)
    html = render_template(
        TEMPLATE,
        report=report,
        score_name=SCORE_NAME,
        score_rows=score_rows,
        reasons=reasons,
        overviews=_overviews(report.stages),
        stages=[(stage, _stage_plots(stage)) for stage in report.stages],
        histograms=_histograms(report.images),
        cards=cards,
        shape=_aspect_ratio(cards),
        splits=sorted({image.split for image in chosen}),
        has_alternatives=any(image.alternatives for image in chosen),
        counts=counts,
        total=len(report.images),
        cluster_colors=color_table(),
        top=max((score for image in chosen if (score := _score(image)) is not None), default=None),
    )
    write_text(path, _with_script_digest(html))


def render_template(path: Path, **values: Any) -> str:
    """The text of an HTML template with escaped values. Raises jinja2.UndefinedError for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=True,  # captions and names are untrusted text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name).render(**values)


def _check(report: Report) -> None:
    for label, cells in report.score_rows:
        if len(cells) != len(report.score_columns):
            raise ValueError(
                f"the score row {label!r} has {len(cells)} cells, but there are {len(report.score_columns)} columns "
                f"({', '.join(report.score_columns)}); give one cell per column"
            )


def _score(image: ReportImage) -> float | None:
    """The score of an image; None when it is missing or not finite."""
    return image.score if image.score is not None and math.isfinite(image.score) else None


def choose_images(
    images: Sequence[ReportImage], max_images: int, *, seed: str
) -> tuple[list[ReportImage], dict[str, int]]:
    """The gallery's pictures in the given order, and the numbers of worst, best and random ones.

    The numbers are {} when the gallery has all pictures.
    The random choice depends on `seed` only. Pictures without a score can only be among the random ones.
    """
    if len(images) <= max_images:
        return list(images), {}
    scored = [(score, index) for index, image in enumerate(images) if (score := _score(image)) is not None]
    ranked = [index for _, index in sorted(scored)]
    third = min(max_images // 3, len(ranked) // 2)
    worst, best = ranked[:third], ranked[len(ranked) - third :]
    rest = sorted(set(range(len(images))) - set(worst) - set(best))
    rng = random.Random(seed)
    at_random = rng.sample(rest, min(len(rest), max_images - 2 * third))
    chosen = [images[index] for index in sorted([*worst, *best, *at_random])]
    return chosen, {"worst": len(worst), "best": len(best), "random": len(at_random)}


@dataclass(frozen=True)
class ScoreCell:
    """A cell of the score table. `mark` is the number of the reason why a score is unavailable, else 0."""

    text: str
    mark: int


@dataclass(frozen=True)
class ScoreRow:
    name: str
    note: str
    cells: list[ScoreCell]


def _score_rows(report: Report) -> tuple[list[ScoreRow], list[str]]:
    """The rows of the score table, and the distinct reasons of unavailable cells in the order of their numbers."""
    reasons: list[str] = []
    rows = []
    for label, texts in report.score_rows:
        name, _, note = label.partition("\n")
        cells = []
        for text in texts:
            mark = 0
            if text.startswith(UNAVAILABLE):
                reason = text.removeprefix(UNAVAILABLE).lstrip(" :") or "no reason given"
                if reason not in reasons:
                    reasons.append(reason)
                mark = reasons.index(reason) + 1
            cells.append(ScoreCell(text, mark))
        rows.append(ScoreRow(name, note, cells))
    return rows, reasons


def _stage_plots(stage: ReportStage) -> list[Plot]:
    return [plot for name, series in stage.curves.items() if (plot := stage_plot(name, series)) is not None]


def _overviews(stages: Sequence[ReportStage]) -> list[Plot]:
    """A chart over the whole run for each CIDEr metric that several stages have, to compare stages."""
    names = dict.fromkeys(name for stage in stages for name in stage.curves if "cider" in name.lower())
    overviews = []
    for name in names:
        series = [(stage.name, stage.curves[name]) for stage in stages if name in stage.curves]
        plot = overview_plot(name, series)
        if plot is not None and plot.bands:
            overviews.append(plot)
    return overviews


def _histograms(images: Sequence[ReportImage]) -> list[Histogram]:
    """One histogram per split, all on the same scale."""
    by_split: dict[str, list[float]] = {}
    for image in images:
        if (score := _score(image)) is not None:
            by_split.setdefault(image.split, []).append(score)
    highest = max((score for scores in by_split.values() for score in scores), default=0.0)
    return [histogram(split, scores, max(highest, 0.01)) for split, scores in by_split.items()]


def _cards(images: Sequence[ReportImage], size: int, *, seed: str) -> list[Card]:
    """A card per picture, sorted by score with the lowest first. Pictures without a score are last."""
    shuffled = random.Random(seed).sample(range(len(images)), len(images))
    with ThreadPoolExecutor(8) as pool:  # on S3 requests spend most of their time waiting
        thumbnails = list(pool.map(lambda image: _thumbnail(image.path, size), images))
    cards = []
    for image, position, thumbnail in zip(images, shuffled, thumbnails, strict=True):
        words = tokenize(image.caption)
        cards.append(
            Card(
                image=image,
                score=_score(image),
                thumbnail=thumbnail,
                length=len(words),
                difference=max((_difference(words, tokenize(o)) for o in image.alternatives.values()), default=0.0),
                position=position,
                attention=_encode_maps(image, image.attention),
                attribution=_encode_maps(image, image.attribution),
                clusters=_cluster_layers(image),
            )
        )
    return sorted(cards, key=lambda card: (card.score is None, card.score or 0.0))


def _encode_maps(image: ReportImage, maps: np.ndarray | None) -> str:
    """The maps (words, N) as base64, one byte per cell, each map scaled from its minimum to its maximum.

    The result is "" without maps, or when the maps are not one square grid per word.
    """
    if maps is None or len(maps) != len(image.caption.split()) or math.isqrt(maps.shape[1]) ** 2 != maps.shape[1]:
        return ""
    low, high = maps.min(1, keepdims=True), maps.max(1, keepdims=True)
    levels = (maps - low) / np.where(high > low, high - low, 1.0)
    return base64.b64encode((255 * levels).astype(np.uint8).tobytes()).decode("ascii")


def _cluster_layers(image: ReportImage) -> list[dict[str, Any]]:
    """The layers for the page's script: title, and one hex digit for the color of each cell (row by row) and word."""
    return [
        {
            "title": layer.title,
            "rows": 0 if layer.cells is None else len(layer.cells),
            "cells": "" if layer.cells is None else "".join(f"{color:x}" for color in layer.cells.ravel()),
            "words": "" if layer.words is None else "".join(f"{color:x}" for color in layer.words),
        }
        for layer in image.clusters
    ]


def _aspect_ratio(cards: Sequence[Card]) -> float:
    """Width divided by height of the gallery's cells: the median of the pictures, limited to 1 to 4/3."""
    ratios = [card.thumbnail.width / card.thumbnail.height for card in cards if card.thumbnail.uri]
    return round(min(4 / 3, max(1.0, statistics.median(ratios))), 3) if ratios else 1.0


def _difference(words: Sequence[str], others: Sequence[str]) -> float:
    """The share of words that only one caption has, among all distinct words of two captions."""
    both = set(words) | set(others)
    return len(set(words) ^ set(others)) / len(both) if both else 0.0


def _thumbnail(path: StoragePath | Path | bytes, size: int) -> Thumbnail:
    """A JPEG with at most `size` pixels on its longer side."""
    try:
        data = path if isinstance(path, bytes) else path.read_bytes()
        picture = decode_image(data, MAX_PIXELS)
    except BadImage as error:
        return Thumbnail("", size, size, str(error))
    except OSError as error:
        return Thumbnail("", size, size, error.strerror or "cannot be read")
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Small synthetic pictures have sharp edges, so they keep the full color resolution; photographs keep half of it.
    small = max(picture.size) < SMALL
    picture.save(buffer, "JPEG", quality=97 if small else JPEG_QUALITY, subsampling=0 if small else 2, optimize=True)
    uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return Thumbnail(uri, *picture.size)


def _with_script_digest(html: str) -> str:
    """Puts the digest of the page's script into its security policy, which then permits no other script."""
    script = html.split("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return html.replace("SCRIPT_DIGEST", digest, 1)
