"""The results of an evaluation in a folder: captions, scores, and a page with tables and captioned pictures."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.evaluation.comparison.published import FinalRow, folded
from raycap.pipeline.evaluation.evaluate import SplitCaptions, keep_results
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.tables import UNAVAILABLE, Rows, SeedScores, format_scores, format_table
from raycap.pipeline.evaluation.results import Scores, SplitScores, write_captions
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions

logger = logging.getLogger(__name__)


def report(scores: Scores, options: StorageOptions, *, title: str, run_id: str, pictured: Sequence[str]) -> Report:
    """The page of an evaluation: scores, quality of the confidence, and captioned pictures.

    options: how to reach the storage of the images. run_id: the name of the model, which also seeds the choice of
    pictures if there are too many. pictured: the splits whose pictures are shown.
    """
    columns, rows = score_table(scores.splits)
    for each in scores.splits:
        rows += published_table(columns, each.published)
    images = [
        image for split in pictured for image in report_images(scores[split], scores.inputs.images[split], options)
    ]
    return Report(
        title=title,
        run_id=run_id,
        protocol=f"{', '.join(pictured)}: {scores.protocol.signature}, {scores.splits[0].signature}",
        score_columns=columns,
        score_rows=rows,
        stages=[],
        images=images,
        metadata={},
        language=scores.protocol.language,
        confidence={each.split: each.quality for each in scores.splits if each.quality is not None},
    )


def score_table(results: Sequence[SplitScores]) -> tuple[list[str], Rows]:
    """The columns of the score table, and one row (label, cells) per split.

    The columns are the metrics of the first split, then the share of captions that name the main object. Columns
    without any text are left out.
    """
    columns = {name: [_cell(result, name) for result in results] for name in results[0].values}
    shares = [result.main_object for result in results]
    columns["main object"] = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    labels = [f"{result.split} ({len(result.captions)} images)" for result in results]
    return list(filled), [(label, cells) for label, *cells in zip(labels, *filled.values(), strict=True)]


def _cell(result: SplitScores, name: str) -> str:
    """A score as text, or why it is unavailable, or "" if the split is not scored with this metric."""
    if result.scores is None:
        return f"{UNAVAILABLE}: not computed"
    score = result.scores.by_name.get(name)
    if score is None:
        return ""
    return f"{UNAVAILABLE}: {score.unavailable}" if score.value is None else f"{score.value:.3f}"


def published_table(columns: list[str], published: Sequence[tuple[FinalRow, str]]) -> Rows:
    """The rows of published scores in our columns (`folded`). A row's label names the differences from our protocol."""
    rows = []
    for row, difference in folded(published):
        cells = [f"{row.scores[column]:.3f}" if column in row.scores else "" for column in columns]
        note = difference or f"Table {row.table}, {row.protocol.signature}"
        rows.append((f"{row.name}\n{note}", cells))
    return rows


def report_images(result: SplitScores, part: Dataset, options: StorageOptions) -> list[ReportImage]:
    """The captioned images of a split, with their captions, references and scores."""
    scores, captions = result.cider_by_image, result.captions
    columns = (part.column(column) for column in ("uri", "key", "captions"))
    rows = zip(part.source_ids(), *columns, strict=True)
    return [
        ReportImage(
            image_id=image,
            path=StoragePath(uri, options),
            caption=captions[image],
            references=references,
            score=scores.get(image),
            split=result.split,
            key=key,
        )
        for image, uri, key, references in rows
        if image in captions
    ]


def write_summary(
    place: StoragePath,
    scores: SeedScores,
    protocol: Protocol,
    content: Mapping[str, Any],
    metadata: Mapping[str, str],
    published: Mapping[str, Rows] = {},
) -> None:
    """Prints the mean scores over seeds with their spread, and writes scores.json and the page report.html to a folder.

    If the page fails, this is logged. content: further keys of scores.json. metadata: shown on the page. published: by
    split, rows with the scores of papers.
    """
    columns, rows, page_rows = scores.columns, Rows(), Rows()
    for split in scores.splits:
        own = scores.rows(split, columns)
        rows += own
        page_rows += own + scores.rows_of_models(split, columns) + published.get(split, [])
    if rows:
        logger.info(f"\n{format_table(columns, rows)}\n")
    recorded = {"protocol": asdict(protocol), "signature": protocol.signature, "splits": scores.to_json()}
    _write_scores(place, {**content, **recorded})
    decorations = Decorations()
    with decorations.making("the report of the seeds"):
        page = Report(place.name, place.name, protocol.signature, columns, page_rows, [], [], dict(metadata))
        (place / "report.html").write_bytes(report_html(page).encode())
    decorations.log_failed()
    logger.info(f"seeds        {place}")


def keep_captions(place: StoragePath, captions: SplitCaptions) -> None:
    """Writes the captions of all splits to a folder of results."""
    for split, images in captions.items():
        predictions = f"predictions-{split}.json"
        write_captions(place, split, images, predictions)
        logger.info(f"predictions  {place / predictions}")


def _write_scores(place: StoragePath, content: Mapping[str, object]) -> None:
    (place / "scores.json").write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


def write_results(place: StoragePath, scores: Scores, settings: RunConfig, *, label: str) -> None:
    """Logs the scores of a model, and writes scores.json and one page per scored split to a folder.

    label: names the model. The fitted confidence is stored in the bundle, unless the model is an ensemble.
    """
    for each in scores.splits:
        _log_scores(each)
    content, decorations = scores.to_json(), Decorations()
    if len(scores.bundles) == 1:
        keep_results(scores, {}, decorations)
    _write_scores(place, content)
    models = ", ".join(bundle.name for bundle in scores.bundles)
    pages: dict[StoragePath, bytes] = {}
    for each in scores.splits:
        if each.scores is None:
            continue
        split, file = each.split, f"report-{each.split}.html"
        with decorations.making(f"the report of {split}"):
            options, title = settings.storage.options, f"{label} on {split}"
            page = report(scores.of(split), options, title=title, run_id=label, pictured=[split])
            metadata = {"models": models, "images": f"{split} {len(each.images)}"}
            pages[place / file] = report_html(replace(page, metadata=metadata)).encode()
    for path, html in pages.items():  # a storage that fails ends the command, unlike a page that cannot be made
        path.write_bytes(html)
        logger.info(f"report       {path}")
    if decorations.failed:
        _write_scores(place, content | {"missing": decorations.failed})
    logger.info(f"scores       {place / 'scores.json'}")
    decorations.log_failed()


def _log_scores(result: SplitScores) -> None:
    """Logs the scores of a split, and published scores with the reasons why they cannot be compared with ours."""
    if result.scores is None:
        logger.info(f"{result.split} has no reference captions: captioned, not scored")
    else:
        logger.info(f"\n{result.split}, {len(result.scores.image_ids)} images{format_scores(result.scores)}")
    if result.main_object is not None:
        logger.info(f"  main object named in {result.main_object:.1%} of the captions")
    for row, difference in folded(result.published):
        values = [f"{name} {value:.3f}" for name, value in row.scores.items()]
        logger.info(f"  {row.name}: {'  '.join([*values, f'({difference})'] if difference else values)}")
