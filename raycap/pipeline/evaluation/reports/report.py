"""The page of an evaluation, and the table of its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.captioning.bundle import bundle_source
from raycap.pipeline.evaluation.comparison.published import FinalRow
from raycap.pipeline.evaluation.reports.gallery import add_maps
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.tables import Rows
from raycap.pipeline.evaluation.results import Scores, SplitScores
from raycap.pipeline.evaluation.scores.metrics import Score
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions


def report(
    scores: Scores,
    settings: RunConfig,
    decorations: Decorations,
    *,
    title: str,
    run_id: str,
    pictured: Sequence[str],
    compared: SplitScores | None = None,
) -> Report:
    """The page of an evaluation: scores, quality of the confidence, and pictures with captions and maps.

    run_id: names the model; it also decides which pictures a long page shows. pictured: the splits with pictures.
    compared: the scores of another model on the only pictured split, whose captions are shown beside. The maps are
    those of the first bundle, and a page without them is better than none. Ray must have been started.
    """
    assert scores.inputs is not None
    results = [*scores.splits, *([] if compared is None else [compared])]
    columns, rows = score_table(results, with_alignment=True)
    for each in scores.splits:
        rows += published_table(columns, each.published)
    parts = [scores.inputs.images[split] for split in pictured]
    images = [
        image
        for split, part in zip(pictured, parts, strict=True)
        for image in report_images(scores[split], part, settings.storage.options, compared)
    ]
    with decorations.making(f"the heat maps of {', '.join(pictured)}"):
        model, store = bundle_source(scores.bundles[0], settings), scores.inputs.stores[0]
        dataset = parts[0] if len(parts) == 1 else Dataset(pa.concat_tables([part.table for part in parts]))
        images = add_maps(images, model, settings, store, dataset, seed=run_id)
    return Report(
        title=title,
        run_id=run_id,
        protocol=f"{', '.join(pictured)}: {scores.protocol.signature}, {scores.splits[0].signature}",
        score_columns=columns,
        score_rows=rows,
        stages=[],
        images=images,
        metadata={},
        language=scores.language,
        confidence={each.split: each.quality for each in scores.splits if each.quality is not None},
    )


def score_table(
    results: Sequence[SplitScores], with_alignment: bool = False
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns of the first split, and one row (label, cells) per split.

    The cell of an unavailable score gives the reason; it is empty for a metric that the split is not scored with.
    """
    columns = {name: [_cell(result, name) for result in results] for name in results[0].values}
    shares, alignments = [result.main_object for result in results], [result.alignment for result in results]
    columns["main object"] = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
    if with_alignment:
        columns["alignment"] = ["" if value is None else f"{value:.3f}" for value in alignments]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    labels = [f"{result.split} ({len(result.captions)} images)" for result in results]
    return list(columns), [(label, cells) for label, *cells in zip(labels, *columns.values(), strict=True)]


def _cell(result: SplitScores, name: str) -> str:
    """A score as text, or the reason why it is unavailable; "" for a metric that was not asked for."""
    score = result.scores.by_name.get(name) if result.scores else Score()
    if score is None:
        return ""
    return f"{score.value:.3f}" if score.value is not None else f"unavailable: {score.unavailable or 'not computed'}"


def published_table(columns: list[str], published: Sequence[tuple[FinalRow, str]]) -> list[tuple[str, list[str]]]:
    """Published scores in our columns. A row's label names differences in protocol."""
    rows = []
    for row, difference in published:
        cells = [f"{row.scores[column]:.3f}" if column in row.scores else "" for column in columns]
        rows.append((f"{row.name}\n{difference or f'Table {row.table}, {row.protocol.signature}'}", cells))
    return rows


def report_images(
    result: SplitScores, part: Dataset, options: StorageOptions, other: SplitScores | None = None, name: str = "other"
) -> list[ReportImage]:
    """The captioned images of a split, with their captions, references and scores.

    other: of another model, whose captions are shown beside with this name.
    """
    scores, captions = result.cider_by_image, result.captions
    others = {} if other is None else other.captions
    rows = zip(*(part.column(column) for column in ("image_id", "uri", "key", "captions")), strict=True)
    return [
        ReportImage(
            image_id=image,
            path=StoragePath(uri, options),
            caption=captions[image],
            references=references,
            score=scores.get(image),
            split=result.split,
            alternatives={name: others[image]} if image in others else {},
            key=key,
        )
        for image, uri, key, references in rows
        if image in captions
    ]


def write_summary(
    place: StoragePath,
    content: Mapping[str, Any],
    columns: list[str],
    rows: Rows,
    metadata: Mapping[str, str],
    decorations: Decorations,
) -> None:
    """Writes scores.json and, unless that fails, the page report.html to a folder, which may be on S3.

    content: of scores.json; "signature" is one of its keys. columns, rows, metadata: of the page.
    """
    (place / "scores.json").write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())
    with decorations.making("the report of the seeds"):
        page = Report(place.name, place.name, content["signature"], columns, rows, [], [], dict(metadata))
        (place / "report.html").write_bytes(report_html(page).encode())
