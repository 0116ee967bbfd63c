"""`raycap score`: scores any COCO result file against the captions of annotation files, without a model."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.config.languages import ENGLISH, code_problem
from raycap.pipeline.config.load import parse_section, read_file
from raycap.pipeline.config.sections import ScoreInputsSection, split_name
from raycap.pipeline.data.caption_files import read_n_best, read_predictions
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.reports.tables import format_scores
from raycap.pipeline.evaluation.scores.metrics import (
    DEFAULT_METRICS,
    METRICS,
    MetricScores,
    ScoreInputs,
    score_captions,
)
from raycap.pipeline.runtime.names import shorten, shown
from raycap.pipeline.storage.atomic import atomic_path, write_text

# Options of the command
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write scores, signature and extras to this JSON file.")]
Language = Annotated[str, typer.Option(help="Of the captions, as a code such as en, de or zh; decides their words.")]
Images = Annotated[
    Path | None, typer.Option(help="The folder of the images that the references name, for CLIPScore and PAC-S.")
]
NBest = Annotated[
    Path | None, typer.Option(help="Several captions per image, as `raycap evaluate` writes them, for diversity.")
]


def score(
    references: Annotated[
        Path, typer.Option(help="Captions: an annotation file of any form, or a folder of images and texts.")
    ],
    predictions: Annotated[Path, typer.Option(help="A COCO result file: a list of image_id and caption.")],
    json_file: JsonFile = None,
    per_image: Annotated[Path | None, typer.Option(help="Write a CSV file with one row per image.")] = None,
    split: Annotated[str | None, typer.Option(help="Score this split of the references, all of it.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help=f"One of {', '.join(METRICS)}; by default the first {len(DEFAULT_METRICS)}."),
    ] = None,
    language: Language = ENGLISH,
    inputs: Annotated[Path | None, typer.Option(help="A YAML file with the keys of evaluation.inputs.")] = None,
    images: Images = None,
    n_best: NBest = None,
) -> MetricScores:
    """Score a COCO result file.

    Neither a model nor Ray is needed. Mistakes in the files are reported before anything is written. In the JSON file,
    a score that cannot be computed is null, and `unavailable` contains the reason.

    Example: raycap score --references captions_val2014.json --predictions results.json --json scores.json
    """
    if problem := code_problem(language):
        raise UserError(f"--language {shown(language)} {problem}")
    for option, path in (("--json", json_file), ("--per-image", per_image)):
        if path is not None:
            check_output_file(option, path)
    candidates = read_predictions(predictions)
    if images is not None and not images.is_dir():
        raise UserError(f"--images {images}: no such folder; give the folder of the images")
    if images is not None and references.is_dir():
        raise UserError(f"--images is for an annotation file; the images of {references} are found in it")
    split = None if split is None else split_name(split)
    dataset = read_references(references, split, images)
    texts = dataset.references()
    source = f"split {split} of {references}" if split else str(references)
    missing = [image for image in texts if image not in candidates]
    if missing and split:
        raise UserError(
            f"{len(missing)} of {len(texts)} images of {source} have no prediction in {predictions} (image ids "
            f"{shorten(missing)}); predict them too, or leave --split out"
        )
    print(f"Scoring {len(candidates)} captions of {predictions} against {source} ({len(texts)} images)", flush=True)
    if missing:
        count = f"{len(missing)} of {len(texts)} reference images"
        print(f"{count} have no prediction: left out, also of the document frequencies")
    section = parse_section(ScoreInputsSection, {} if inputs is None else read_file(inputs), "evaluation.inputs")
    several = None if n_best is None else read_n_best(n_best)
    uris = {image: uri for image, uri in dataset.uris().items() if uri}
    scores = score_captions(
        texts,
        candidates,
        metrics=metrics or DEFAULT_METRICS,
        language=language,
        inputs=ScoreInputs.read(section, language, several=several, uris=uris),
    )
    print(format_scores(scores))
    if json_file is not None:
        content = scores.to_json() | {"images": len(scores.image_ids)}
        write_text(json_file, json.dumps(content, indent=2) + "\n")
        print(f"Scores: {json_file}")
    if per_image is not None:
        _write_per_image(per_image, scores, [candidates[image] for image in scores.image_ids])
        print(f"Scores of each image: {per_image}")
    return scores


def _write_per_image(path: Path, scores: MetricScores, captions: Sequence[str]) -> None:
    """Writes one row per image: image_id, caption, and a column for every metric with a value per image."""
    columns = {name: score.per_image for name, score in scores.by_name.items() if score.per_image is not None}
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "caption", *columns])
        writer.writerows(zip(scores.image_ids, captions, *columns.values(), strict=True))
