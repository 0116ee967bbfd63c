"""The summary of a run: the score table for the terminal, and the report page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raycap.pipeline.config.languages import metric_tokenizer
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.comparison.protocol import run_protocol
from raycap.pipeline.evaluation.comparison.published import FinalRow, published_rows
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, ReportStage, write_report
from raycap.pipeline.evaluation.scores.metrics import Score
from raycap.pipeline.evaluation.scores.split_result import SplitResult
from raycap.pipeline.features.extraction import describe_features
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.runs.run_scores import RunScores
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions

CURVE_LABELS = {  # by kind of entry and name: the journal's metrics that the report plots
    ("train", "loss"): "loss",
    ("train", "reward"): "reward",
    ("train", "length"): "sampled length",
    ("train", "lr"): "learning rate",
    ("train", "images_per_s"): "images/s",
    ("validation", "CIDEr-D"): "validation CIDEr-D",
}


def score_table(
    results: Sequence[SplitResult], with_alignment: bool = False
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


def _cell(result: SplitResult, name: str) -> str:
    """A score as text, or the reason why it is unavailable; "" for a metric that was not asked for."""
    score = result.scores.by_name.get(name) if result.scores else Score()
    if score is None:
        return ""
    return f"{score.value:.3f}" if score.value is not None else f"unavailable: {score.unavailable or 'not computed'}"


def scored_uris(result: SplitResult, dataset: Dataset) -> list[str]:
    """The URIs of the images of a split that were scored; without scores, of those that were captioned."""
    scored = set(result.captions) if result.scores is None else set(result.scores.image_ids)
    rows = zip(dataset.column("image_id"), dataset.column("uri"), strict=True)
    return [uri for image, uri in rows if image in scored]


def published_table(columns: list[str], published: Sequence[tuple[FinalRow, str]]) -> list[tuple[str, list[str]]]:
    """Published scores in our columns. A row's label names differences in protocol."""
    rows = []
    for row, difference in published:
        cells = [f"{row.scores[column]:.3f}" if column in row.scores else "" for column in columns]
        rows.append((f"{row.name}\n{difference or f'Table {row.table}, {row.protocol.signature}'}", cells))
    return rows


def validation_lines(config: RunConfig, by_stage: Mapping[str, float]) -> Iterator[str]:
    """Validation CIDEr-D after each stage, and the gain of SCST over cross entropy.

    These scores use the metrics' words, like the score table. During training, validation uses the vocabulary's tokens.
    """
    label = f"validation CIDEr-D ({metric_tokenizer(config.data.language)} tokens)  "
    yield label + ", ".join(f"{name} {value:.4f}" for name, value in by_stage.items())
    objectives = {stage.name: stage.objective for stage in config.stages}
    ascending = sorted(by_stage.items(), key=lambda item: item[1])
    # The highest value of each objective: in ascending order, a later value replaces an earlier one.
    best = {objectives[name]: value for name, value in ascending}
    if best.keys() == {"cross_entropy", "scst"}:
        gain = best["scst"] - best["cross_entropy"]
        yield f"{'':{len(label)}}SCST {'gains' if gain >= 0 else 'LOSES'} {abs(gain):.4f} over cross entropy"


def report_images(result: SplitResult, part: Dataset, options: StorageOptions) -> list[ReportImage]:
    """The captioned images of a split, with their captions, references and scores."""
    scores = result.cider_by_image
    rows = zip(*(part.column(name) for name in ("image_id", "uri", "key", "captions")), strict=True)
    return [
        ReportImage(
            image_id=image,
            path=StoragePath(uri, options),
            caption=result.captions[image],
            references=references,
            score=scores.get(image),
            split=result.split,
            key=key,
        )
        for image, uri, key, references in rows
        if image in result.captions
    ]


def make_report(
    folder: RunFolder, dataset: Dataset, scores: RunScores, durations: Mapping[str, float], images: list[ReportImage]
) -> None:
    """Writes report.html of a finished run."""
    config, metadata = folder.config, folder.metadata
    columns, rows = score_table(scores.splits, with_alignment=True)
    ours = run_protocol(config, folder.delivered())
    distilled = metadata.distilled
    by_split = {result.split: result for result in scores.splits}
    for split in config.data.test_splits:
        uris = scored_uris(by_split[split], dataset.split(split))
        rows += published_table(columns, published_rows(ours, split, uris))
    report = Report(
        title=config.name,
        run_id=folder.run_id,
        protocol=f"{', '.join(config.data.test_splits)}: {ours.signature}, {scores.splits[0].signature}",
        score_columns=columns,
        score_rows=rows,
        stages=[_report_stage(folder, stage.name, scores.validation_by_stage) for stage in config.stages],
        images=images,
        metadata={
            "images": ", ".join(f"{split} {count}" for split, count in metadata.splits.items()),
            "seed": f"{config.seed}; the scores are of this seed only",
            "model": f"{config.model.name}, {metadata.parameters['model']:,} parameters",
            "features": describe_features(config, metadata.num_tokens, metadata.parameters["backbone"]),
            **({} if distilled is None else {"teacher": f"{distilled}, of {distilled.model}"}),
            "durations": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in durations.items()),
            "commit": metadata.commit,
            "data fingerprint": metadata.data_fingerprint[:16],
            "versions": ", ".join(f"{name} {version}" for name, version in metadata.versions.items()),
        },
        language=config.data.language,
        confidence=scores.quality,
    )
    write_report(folder.path / "report.html", report)


def _report_stage(folder: RunFolder, name: str, validation: Mapping[str, float]) -> ReportStage:
    """The curves and the results of one stage for the report. validation: CIDEr-D by stage name."""
    entries = [entry for entry in read_journal(folder.journal) if entry["stage"] == name]
    curves = {
        label: [(entry["step"], entry[key]) for entry in entries if entry["kind"] == kind and key in entry]
        for (kind, key), label in CURVE_LABELS.items()
    }
    curves = {label: points for label, points in curves.items() if points}
    result = folder.result(name)
    summary = {} if result is None else {"steps": str(result.steps), "best at step": str(result.best_step)}
    if name in validation:
        summary["validation CIDEr-D"] = f"{validation[name]:.4f}"
    return ReportStage(name, curves, summary)
