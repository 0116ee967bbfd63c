"""`raycap score`: scores any COCO result file against COCO or Karpathy references; needs no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.scoring.metrics import METRICS, Scores, score_captions
from pipeline.scoring.result_files import read_predictions, read_references, shorten
from pipeline.storage.atomic import atomic_path, write_text


def score(
    references: Path,
    predictions: Path,
    *,
    json_file: Path | None = None,
    per_image: Path | None = None,
    split: str | None = None,
    complete: bool = False,
    metrics: Sequence[str] = METRICS,
    java_deadline_s: float | None = None,
) -> Scores:
    """Scores `predictions` against `references`, prints the table, and writes the files that are asked for.

    json_file: scores, extras and signature. per_image: a row an image, Parquet or CSV by the name's ending. split:
    only that split of a Karpathy file, all of it. complete: every reference image must have a prediction. Raises
    UserError for the caller's mistakes, before anything is written.
    """
    _check_targets(json_file, per_image)
    candidates = read_predictions(predictions)
    captions = read_references(references, split)
    which = f"split {split} of {references}" if split else str(references)
    missing = [image for image in captions if image not in candidates]
    if missing and (complete or split):
        raise UserError(
            f"{len(missing)} of {len(captions)} images of {which} have no prediction in {predictions} (image ids "
            f"{shorten(missing)}); predict them too, or leave --complete and --split out"
        )
    print(f"Scoring {len(candidates)} captions of {predictions} against {which} ({len(captions)} images)", flush=True)
    if missing:
        print(
            f"{len(missing)} of {len(captions)} reference images have no prediction: left out, also of the document "
            f"frequencies"
        )
    scores = score_captions(captions, candidates, metrics=metrics, java_deadline_s=java_deadline_s)
    print(format_scores(scores))
    if json_file is not None:
        write_scores(json_file, scores)
        print(f"Scores: {json_file}")
    if per_image is not None:
        write_per_image(per_image, scores, [candidates[image] for image in scores.image_ids])
        print(f"Scores of each image: {per_image}")
    return scores


def format_scores(scores: Scores) -> str:
    """A row a metric, then what is worth a look, and the signature."""
    lines = [""]
    for name, found in scores.by_name.items():
        value = f"{found.value:.3f}" if found.value is not None else f"unavailable: {found.unavailable}"
        lines.append(f"  {name:<9} {value}")
    extras = scores.extras
    if "spice_categories" in extras:
        parts = (f"{name} {value:.3f}" for name, value in extras["spice_categories"].items() if value is not None)
        lines.append(f"  {'':<9} {', '.join(parts)}")
    repeated = ", ".join(f"{share:.1%} {n}-grams" for n, share in extras["repeated_ngrams"].items())
    lines += [
        "",
        f"  {len(scores.image_ids)} captions, {extras['mean_length']:.1f} words on average, "
        f"{extras['distinct_words']} distinct words",
        f"  broken endings {extras['broken_endings']:.1%}, doubled words {extras['doubled_words']:.1%}, "
        f"captions that repeat: {repeated}",
    ]
    if extras["empty"]:
        empty = round(extras["empty"] * len(scores.image_ids))
        lines.append(f"  {empty} of the captions hold no word: they match nothing and score 0")
    return "\n".join([*lines, f"  {scores.signature}", ""])


def write_scores(path: Path, scores: Scores) -> None:
    """One JSON object; a score that could not be had is null under "scores" and has its reason under "unavailable"."""
    content = {
        "scores": {name: found.value for name, found in scores.by_name.items()},
        "unavailable": {name: found.unavailable for name, found in scores.by_name.items() if found.unavailable},
        "images": len(scores.image_ids),
        "signature": scores.signature,
        "extras": scores.extras,
    }
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_per_image(path: Path, scores: Scores, captions: Sequence[str]) -> None:
    """A row an image: image_id, caption, and a column for every metric that has values by image."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    columns = {name: found.per_image for name, found in scores.by_name.items() if found.per_image is not None}
    ids = scores.image_ids if len({type(image) for image in scores.image_ids}) == 1 else map(str, scores.image_ids)
    table = pa.table({"image_id": list(ids), "caption": list(captions), **columns})
    with atomic_path(path) as temporary:
        if path.suffix == ".csv":
            pyarrow.csv.write_csv(table, temporary)
        else:
            pyarrow.parquet.write_table(table, temporary)


def _check_targets(json_file: Path | None, per_image: Path | None) -> None:
    if per_image is not None and per_image.suffix not in (".csv", ".parquet"):
        raise UserError(f"--per-image {per_image}: expected a name that ends in .csv or .parquet")
    for option, path in (("--json", json_file), ("--per-image", per_image)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{option} {path}: this is a folder; give a file's name")
