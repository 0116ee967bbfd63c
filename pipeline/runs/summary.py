"""What a run shows at its end: the table on the terminal, and what the report page is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.reports.page import Report, ReportImage, ReportStage, write_report
from pipeline.runs.folder import RunFolder
from pipeline.runs.journal import read_journal
from pipeline.scoring.published import published_rows
from pipeline.scoring.result_files import read_predictions
from pipeline.storage.path import StoragePath

CURVES = {
    "loss": "loss",
    "reward": "reward (CIDEr-D)",
    "length": "sampled length",
    "lr": "learning rate",
    "images_per_s": "images/s",
}


def score_table(result: dict[str, Any], align: bool = False) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and one row a split; a score that is not there says why. align: with the alignment score."""
    first = next(iter(result["splits"].values()))
    columns = list(first["scores"])
    accuracy = any(entry["main_object"] is not None for entry in result["splits"].values())
    alignment = align and any(entry.get("alignment") is not None for entry in result["splits"].values())
    rows = []
    for split, entry in result["splits"].items():
        cells = [
            f"{value:.3f}" if value is not None else f"unavailable: {entry['unavailable'].get(name, 'not computed')}"
            for name, value in entry["scores"].items()
        ]
        if accuracy:
            cells.append("" if entry["main_object"] is None else f"{100 * entry['main_object']:.1f} %")
        if alignment:
            cells.append("" if entry.get("alignment") is None else f"{entry['alignment']:.3f}")
        rows.append((f"{split} ({entry['images']} images)", cells))
    return columns + ["main object"] * accuracy + ["alignment"] * alignment, rows


def published_table(columns: list[str], config: RunConfig, split: str, uris: list[str]) -> list[tuple[str, list[str]]]:
    """The papers' rows for the same system and split, under the columns of ours; the label says what differs."""
    return [
        (
            f"{row.name}\n{difference or row.protocol}",
            [f"{row.scores[c]:.3f}" if c in row.scores else "" for c in columns],
        )
        for row, difference in published_rows(config.model.name, split, uris, config.evaluation.beam_size)
    ]


def report_images(folder: RunFolder, dataset: Dataset, result: dict[str, Any]) -> list[ReportImage]:
    """The test splits' images with captions, references and scores."""
    splits = folder.config.data.test_splits
    return [
        image
        for split in splits
        for image in _images(folder, dataset.split(split), split, result["splits"][split]["per_image_CIDEr-D"])
    ]


def make_report(
    folder: RunFolder,
    dataset: Dataset,
    result: dict[str, Any],
    durations: dict[str, float],
    images: list[ReportImage],
) -> Path:
    """Writes report.html of a finished run."""
    config, facts = folder.config, folder.facts
    columns, rows = score_table(result, align=True)
    for split in config.data.test_splits:
        rows += published_table(columns, config, split, dataset.split(split).column("uri"))
    stages = [_stage(folder, stage.name, result["validation_by_stage"]) for stage in config.stages]
    first = next(iter(result["splits"].values()))
    report = Report(
        title=config.name,
        run_id=folder.run_id,
        protocol=f"{', '.join(config.data.test_splits)}: {config.evaluation.protocol}, {first['signature']}",
        score_columns=columns,
        score_rows=rows,
        stages=stages,
        images=images,
        metadata={
            "images": ", ".join(f"{split} {count}" for split, count in facts["splits"].items()),
            "model": f"{config.model.name}, {facts['parameters']['model']:,} parameters",
            "features": _features(config, facts),
            "durations": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in durations.items()),
            "commit": facts["commit"],
            "data fingerprint": facts["data_fingerprint"][:16],
            "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        },
    )
    path = folder.path / "report.html"
    write_report(path, report)
    return path


def _features(config: RunConfig, facts: dict[str, Any]) -> str:
    if config.features.hdf5 is not None:
        return f"regions of {config.features.hdf5}, at most {facts['num_tokens']}"
    count = facts["parameters"]["backbone"]
    return f"{config.backbone.name}, {config.backbone.image_size} px, {count:,} parameters"


def _images(folder: RunFolder, part: Dataset, split: str, scores: dict[int, float]) -> list[ReportImage]:
    predictions = read_predictions(folder.path / "predictions" / f"{split}.json")
    rows = zip(part.column("image_id"), part.column("uri"), part.column("captions"), strict=True)
    return [
        ReportImage(
            image_id=image,
            path=StoragePath(uri, folder.config.storage.options),
            caption=predictions[image],
            references=captions,
            score=scores.get(image),
            split=split,
        )
        for image, uri, captions in rows
    ]


def _stage(folder: RunFolder, name: str, validation: dict[str, float]) -> ReportStage:
    entries = [entry for entry in read_journal(folder.journal) if entry["stage"] == name]
    curves: dict[str, list[tuple[int, float]]] = {}
    for key, label in CURVES.items():
        points = [(entry["step"], entry[key]) for entry in entries if entry["kind"] == "train" and key in entry]
        if points:
            curves[label] = points
    points = [(entry["step"], entry["CIDEr-D"]) for entry in entries if entry["kind"] == "validation"]
    if points:
        curves["validation CIDEr-D"] = points
    outcome = folder.result(name) or {}
    summary = {"steps": str(outcome.get("steps", "?")), "best at step": str(outcome.get("best_step", "?"))}
    if name in validation:
        summary["validation CIDEr-D"] = f"{validation[name]:.4f}"
    return ReportStage(name, curves, summary)
