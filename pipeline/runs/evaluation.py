"""Scores of a run: from predictions files to score tables, the report and the summary.

Every number printed at a run's end is computed from a predictions file (COCO's result format) that stays in the run's
folder, so that anyone can compute it again with `raycap score`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models.constraints import ConstraintAutomaton
from pipeline.captioning.captioning import Hypothesis
from pipeline.captioning.constraints import Held
from pipeline.data.dataset import Dataset
from pipeline.data.synthetic import main_object_accuracy
from pipeline.runs.folder import RunFolder, read_json, write_json
from pipeline.scoring.metrics import Scores, score_captions

logger = logging.getLogger(__name__)


METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D")


def write_predictions(path: Path, captions: dict[int, str]) -> None:
    """COCO's result format."""
    write_json(path, [{"image_id": image, "caption": caption} for image, caption in captions.items()])


def read_predictions(path: Path) -> dict[int, str]:
    return {row["image_id"]: row["caption"] for row in read_json(path)}


def score_split(folder: RunFolder, dataset: Dataset, split: str, metrics: tuple[str, ...] = METRICS) -> Scores:
    """Scores of predictions/<split>.json against the split's references."""
    return score_file(dataset.split(split), folder.path / "predictions" / f"{split}.json", metrics)


def score_file(dataset: Dataset, path: Path, metrics: tuple[str, ...] = METRICS) -> Scores:
    return score_captions(dataset.references(), read_predictions(path), metrics=metrics)


def summarize_search(
    best: Mapping[int, Hypothesis],
    machines: Mapping[int, ConstraintAutomaton],
    what: str,
) -> dict[str, Any]:
    """What the search itself tells of a split's best captions: "alignment", the mean over images, and "constraints".

    Both are said. Alignment is None where no caption has one, constraints where no image has any; else how many hold
    theirs, and the images whose caption does not hold all.
    """
    aligned = [each.alignment for each in best.values() if each.alignment is not None]
    found: dict[str, Any] = {"alignment": sum(aligned) / len(aligned) if aligned else None, "constraints": None}
    if aligned:
        logger.info(f"{what}alignment of words and patches {found['alignment']:.3f}")
    asked = {image: (best[image].num_satisfied or 0, machines[image].count) for image in best if image in machines}
    if asked:
        held = Held.of(asked.values())
        lacking = [image for image, (own, total) in asked.items() if own < total]
        found["constraints"] = {**held._asdict(), "not_held": lacking}
        logger.info(f"{what}{held}")
    return found


def validation_by_stage(folder: RunFolder, dataset: Dataset) -> dict[str, float]:
    """CIDEr-D on the validation split after each stage, from the predictions that the stage kept with its best."""
    validation = dataset.split(folder.config.data.val_split)
    found = {}
    for stage in folder.config.stages:
        path = folder.stage(stage.name) / "predictions-val.json"
        if path.is_file():
            score = score_file(validation, path, ("CIDEr-D",)).by_name["CIDEr-D"].value
            if score is not None:
                found[stage.name] = score
    return found


def main_objects(folder: RunFolder, dataset: Dataset, split: str) -> float | None:
    """Share of images whose main object's color and shape the caption names; only for the embedded data set."""
    if folder.config.data.synthetic is None:
        return None
    predictions = read_predictions(folder.path / "predictions" / f"{split}.json")
    return main_object_accuracy(predictions, dataset.split(split).references())


def evaluate_run(folder: RunFolder, dataset: Dataset) -> dict[str, Any]:
    """All scores of a run, written to scores.json: by split and metric, and validation CIDEr-D by stage."""
    splits: dict[str, Any] = {}
    path = folder.path / "predictions" / "_search.json"
    searched = read_json(path) if path.is_file() else {}
    names = (*folder.config.data.test_splits, folder.config.data.val_split)
    with ThreadPoolExecutor() as pool:  # most of the time is Java's, in its own processes
        found = list(pool.map(lambda split: score_split(folder, dataset, split), names))
    for split, scores in zip(names, found, strict=True):
        splits[split] = {
            "images": len(scores.image_ids),
            "scores": {name: score.value for name, score in scores.by_name.items()},
            "unavailable": {name: score.unavailable for name, score in scores.by_name.items() if score.unavailable},
            "signature": scores.signature,
            "extras": scores.extras,
            "main_object": main_objects(folder, dataset, split),
            "alignment": searched.get(split, {}).get("alignment"),
            "constraints": searched.get(split, {}).get("constraints"),
            "per_image_CIDEr-D": dict(zip(scores.image_ids, scores.by_name["CIDEr-D"].per_image or [], strict=False)),
        }
    result = {"splits": splits, "validation_by_stage": validation_by_stage(folder, dataset)}
    write_json(folder.path / "scores.json", result)
    return result


def flat_scores(result: dict[str, Any]) -> dict[str, float]:
    """{"test_CIDEr-D": ...}: what the tracker and the model registry keep."""
    flat: dict[str, float] = {}
    for split, entry in result["splits"].items():
        values = entry["scores"] | {"main_object": entry["main_object"], "alignment": entry.get("alignment")}
        flat |= {f"{split}_{name}": value for name, value in values.items() if value is not None}
    return flat
