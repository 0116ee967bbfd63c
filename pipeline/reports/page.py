"""The report of a run: one HTML file with scores, training curves and a gallery, which loads nothing from anywhere."""

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
from pipeline.reports import charts as plots
from pipeline.reports.cluster_pictures import LayerColors, color_table
from pipeline.reports.text_table import UNAVAILABLE
from pipeline.storage.atomic import write_text
from pipeline.storage.path import StoragePath

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_PIXELS = 200_000_000
JPEG_QUALITY = 82
SMALL = 128  # pictures below this many pixels are kept as they are and enlarged without blur
MAX_IMAGES = 200  # pictures on a page
SCORE_NAME = "CIDEr-D"


@dataclass(frozen=True)
class ReportImage:
    """One picture of the gallery.

    `path` is the picture's file (on S3 a StoragePath) or its bytes; `score` its own CIDEr-D (None where there is none);
    `alternatives` are other captions by name, for example those of earlier stages or of another model. `attention`
    (words, N) is where the model looked for each word of the caption, over a square grid of N image tokens;
    `attribution` (words, N) what each token added to the word's log-probability; `clusters` a model's clusters of
    patches and words, layer by layer.
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
    """One training stage: `curves` by metric as (global step, value), `summary` as short facts by name."""

    name: str
    curves: dict[str, list[tuple[int, float]]]
    summary: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What the page shows.

    `score_rows` are (label, one cell a column). What follows a newline in a label stands under it in small type
    ("ExpansionNet v2, single model\\nnot comparable: other data"). A cell that starts with "unavailable" is
    explained under the table.
    """

    title: str
    run_id: str
    protocol: str
    score_columns: list[str]
    score_rows: list[tuple[str, list[str]]]
    stages: list[ReportStage]
    images: list[ReportImage]
    facts: dict[str, str]


def write_report(path: Path, report: Report, *, max_images: int = MAX_IMAGES, thumbnail: int = 256) -> None:
    """Writes the page to `path`, whole or not at all; what was there before stays until then.

    With more than `max_images` pictures the gallery holds a third each of the worst, the best and a random draw,
    and says so. `thumbnail` is the longer side of a picture in pixels. A picture that cannot be read gets a
    placeholder with the reason. Raises ValueError when a score row has not one cell a column.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    _check(report)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,  # captions are other people's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    chosen, drawn = choose_images(report.images, max_images, seed=report.run_id)
    cards = _cards(chosen, thumbnail, seed=report.run_id)
    html = environment.get_template(TEMPLATE.name).render(
        report=report,
        score_name=SCORE_NAME,
        table=_score_table(report),
        overviews=_overviews(report.stages),
        stages=[(stage, _stage_plots(stage)) for stage in report.stages],
        histograms=_histograms(report.images),
        cards=cards,
        shape=_shape(cards),
        splits=sorted({image.split for image in chosen}),
        has_alternatives=any(image.alternatives for image in chosen),
        drawn=drawn,
        total=len(report.images),
        cluster_colors=color_table(),
        top=max((score for image in chosen if (score := _score(image)) is not None), default=None),
    )
    write_text(path, _with_script_digest(html))


def _check(report: Report) -> None:
    for label, cells in report.score_rows:
        if len(cells) != len(report.score_columns):
            raise ValueError(
                f"the score row {label!r} has {len(cells)} cells, but there are {len(report.score_columns)} columns "
                f"({', '.join(report.score_columns)}); give one cell a column"
            )


def _score(image: ReportImage) -> float | None:
    return image.score if image.score is not None and math.isfinite(image.score) else None


def choose_images(
    images: Sequence[ReportImage], max_images: int, *, seed: str
) -> tuple[list[ReportImage], dict[str, int]]:
    """The gallery's pictures in the given order, and how many are there as worst, best and random ({} for all).

    The random draw depends on `seed` only. Pictures without a score can only be drawn at random.
    """
    if len(images) <= max_images:
        return list(images), {}
    scored = [(score, index) for index, image in enumerate(images) if (score := _score(image)) is not None]
    ranked = [index for _, index in sorted(scored)]
    each = min(max_images // 3, len(ranked) // 2)
    worst, best = ranked[:each], ranked[len(ranked) - each :]
    rest = sorted(set(range(len(images))) - set(worst) - set(best))
    rng = random.Random(seed)
    at_random = rng.sample(rest, min(len(rest), max_images - 2 * each))
    chosen = [images[index] for index in sorted([*worst, *best, *at_random])]
    return chosen, {"worst": len(worst), "best": len(best), "random": len(at_random)}


def _score_table(report: Report) -> dict[str, Any]:
    """Rows with label, note and cells; reasons of unavailable cells collected as numbered notes."""
    reasons: list[str] = []
    rows = []
    for label, cells in report.score_rows:
        name, _, note = label.partition("\n")
        shown = []
        for cell in cells:
            mark = 0
            if cell.startswith(UNAVAILABLE):
                reason = cell.removeprefix(UNAVAILABLE).lstrip(" :") or "no reason given"
                if reason not in reasons:
                    reasons.append(reason)
                mark = reasons.index(reason) + 1
            shown.append({"text": cell, "mark": mark})
        rows.append({"name": name, "note": note, "cells": shown})
    return {"columns": report.score_columns, "rows": rows, "reasons": reasons}


def _stage_plots(stage: ReportStage) -> list[plots.Plot]:
    drawn = (plots.stage_plot(name, series) for name, series in stage.curves.items())
    return [plot for plot in drawn if plot is not None]


def _overviews(stages: Sequence[ReportStage]) -> list[plots.Plot]:
    """CIDEr metrics that several stages have, each over the whole run: does the next stage improve on the last?"""
    names = dict.fromkeys(name for stage in stages for name in stage.curves if "cider" in name.lower())
    drawn = []
    for name in names:
        having = [(stage.name, stage.curves[name]) for stage in stages if name in stage.curves]
        plot = plots.overview_plot(name, having)
        if plot is not None and plot.bands:
            drawn.append(plot)
    return drawn


def _histograms(images: Sequence[ReportImage]) -> list[plots.Histogram]:
    """One a split, on one scale."""
    by_split: dict[str, list[float]] = {}
    for image in images:
        if (score := _score(image)) is not None:
            by_split.setdefault(image.split, []).append(score)
    highest = max((score for scores in by_split.values() for score in scores), default=0.0)
    return [plots.histogram(split, scores, max(highest, 0.01)) for split, scores in by_split.items()]


def _cards(images: Sequence[ReportImage], thumbnail: int, *, seed: str) -> list[dict[str, Any]]:
    """What the template shows of each picture, worst first."""
    shuffled = random.Random(seed).sample(range(len(images)), len(images))
    with ThreadPoolExecutor(8) as pool:  # on S3 a request waits most of its time
        thumbnails = list(pool.map(lambda image: _thumbnail(image.path, thumbnail), images))
    cards = []
    for image, place, (uri, width, height, problem) in zip(images, shuffled, thumbnails, strict=True):
        words = tokenize(image.caption)
        cards.append(
            {
                "image": image,
                "score": _score(image),
                "uri": uri,
                "width": width,
                "height": height,
                "small": max(width, height) < SMALL,
                "problem": problem,
                "alt": image.references[0] if image.references else image.caption,
                "length": len(words),
                "difference": max((_difference(words, tokenize(o)) for o in image.alternatives.values()), default=0.0),
                "place": place,
                "attention": _heat(image, image.attention),
                "attribution": _heat(image, image.attribution),
                "clusters": _cluster_layers(image),
            }
        )
    return sorted(cards, key=lambda card: (card["score"] is None, card["score"]))


def _heat(image: ReportImage, maps: np.ndarray | None) -> str:
    """The maps of a picture as base64, a byte a cell, each stretched from its least to its greatest; "" for none.

    Only where there is one map a word and they lie on a square grid.
    """
    if maps is None or len(maps) != len(image.caption.split()) or math.isqrt(maps.shape[1]) ** 2 != maps.shape[1]:
        return ""
    low, high = maps.min(1, keepdims=True), maps.max(1, keepdims=True)
    levels = (maps - low) / np.where(high > low, high - low, 1.0)
    return base64.b64encode((255 * levels).astype(np.uint8).tobytes()).decode("ascii")


def _cluster_layers(image: ReportImage) -> list[dict[str, Any]]:
    """Each layer's title, and its color numbers as hexadecimal digits: cells row by row, and words."""
    return [
        {
            "title": layer.title,
            "rows": 0 if layer.cells is None else len(layer.cells),
            "cells": "" if layer.cells is None else "".join(f"{color:x}" for color in layer.cells.ravel()),
            "words": "" if layer.words is None else "".join(f"{color:x}" for color in layer.words),
        }
        for layer in image.clusters
    ]


def _shape(cards: Sequence[dict[str, Any]]) -> float:
    """Width by height of the gallery's cells: the pictures' median, from square to 4:3, so that most fill theirs."""
    ratios = [card["width"] / card["height"] for card in cards if card["uri"]]
    return round(min(4 / 3, max(1.0, statistics.median(ratios))), 3) if ratios else 1.0


def _difference(words: Sequence[str], others: Sequence[str]) -> float:
    """Share of the two captions' distinct words that only one of them has: 0 for the same words, 1 for none shared."""
    both = set(words) | set(others)
    return len(set(words) ^ set(others)) / len(both) if both else 0.0


def _thumbnail(path: StoragePath | Path | bytes, size: int) -> tuple[str, int, int, str]:
    """(data URI, width, height, problem): a JPEG of `size` pixels at most on its longer side."""
    try:
        data = path if isinstance(path, bytes) else path.read_bytes()
        picture = decode_image(data, MAX_PIXELS)
    except BadImage as error:
        return "", size, size, str(error)
    except OSError as error:
        return "", size, size, error.strerror or "cannot be read"
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # Small drawn scenes are all edges: color at full resolution there, at half for photographs.
    small = max(picture.size) < SMALL
    picture.save(buffer, "JPEG", quality=97 if small else JPEG_QUALITY, subsampling=0 if small else 2, optimize=True)
    uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return uri, *picture.size, ""


def _with_script_digest(html: str) -> str:
    """Lets the page run its own script and nothing else, should escaping ever fail: see the policy in the template."""
    script = html.split("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return html.replace("SCRIPT_DIGEST", digest, 1)
