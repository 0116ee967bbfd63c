"""The results of a run: its bundle, the captions of an earlier attempt, the scores of its stages, and its page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from raycap.models.config import Values
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.data.caption_files import N_BEST, read_predictions
from raycap.pipeline.data.dataset import Dataset, ImageId
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import BUNDLE_FILES, save_bundle
from raycap.pipeline.evaluation.comparison.protocol import run_protocol
from raycap.pipeline.evaluation.evaluate import caption_scores
from raycap.pipeline.evaluation.reports.page import Report, ReportStage
from raycap.pipeline.evaluation.results import ImageCaption, read_captions
from raycap.pipeline.features.extraction import describe_features
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.journal import read_journal
from raycap.pipeline.storage.atomic import read_json
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.weights import load_weights

logger = logging.getLogger(__name__)

CURVE_LABELS = {  # labels of the curves on the page, by kind of journal entry and name of the metric
    ("train", "loss"): "loss",
    ("train", "reward"): "reward",
    ("train", "length"): "sampled length",
    ("train", "lr"): "learning rate",
    ("train", "images_per_s"): "images/s",
    ("validation", "CIDEr-D"): "validation CIDEr-D",
}


def _bundle_path(folder: RunFolder, stage: StageSection | None = None) -> Path:
    """The local folder of a run's bundle, models/NAME/RUN, or of a stage's bundle, models/NAME/RUN-STAGE."""
    name = folder.run_id if stage is None else f"{folder.run_id}-{stage.name}"
    return folder.config.working_path / "models" / folder.config.name / name


def bundle_place(folder: RunFolder, stage: StageSection | None = None) -> StoragePath:
    """The location of a run's or a stage's bundle that every machine can reach: on S3 if the run is on S3."""
    path = _bundle_path(folder, stage)
    return folder.config.home(path.relative_to(folder.config.working_path).as_posix()) or storage_path(path)


def local_bundle(folder: RunFolder) -> Path:
    """Returns the local folder of a finished run's bundle, and downloads the bundle if the storage is on S3."""
    path, location = _bundle_path(folder), bundle_place(folder)
    if location.is_remote:
        Mirror(location, path).pull(only=BUNDLE_FILES)
    return path


def bundle_run(folder: RunFolder, stage: StageSection | None = None) -> Path:
    """Writes a bundle with the weights that the run delivers, and returns its local folder.

    stage: if given, the bundle has the best weights of this stage, even if the run did not keep the stage.
    """
    from raycap.models.captioner import build_captioner

    config = folder.config
    captioner = build_captioner(config.model, folder.metadata.sizes, config.backbone if config.has_backbone else None)
    for part, module in captioner.named_children():  # "model" and, if there is one, "backbone"
        load_weights(module, folder.delivered_weights(part) if stage is None else folder.weights_after(stage, part))
    info: Values = {"run": folder.run_id, "commit": folder.metadata.commit}
    if stage is not None:
        info["stage"] = stage.name
    path, location = _bundle_path(folder, stage), bundle_place(folder, stage)
    protocol = run_protocol(config, stage or folder.delivered())
    save_bundle(path, captioner, folder.vocabulary, name=config.name, protocol=protocol, info=info)
    if location.is_remote:
        Mirror(location, path).push()
    return path


def stored_captions(
    folder: RunFolder, images: Mapping[str, Dataset], digests: Mapping[str, str]
) -> dict[str, dict[ImageId, ImageCaption]] | None:
    """The captions that an earlier attempt at the run has stored, by split and image id.

    Returns None if another bundle made the captions, or if they belong to other images. If a file is damaged, logs its
    name and returns None. images: the data set of each split. digests: of the bundle, as scores.json records them.
    """
    path = folder.path / "scores.json"
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if content.get("digests") != digests:
            return None
        found = {}
        for split, part in images.items():
            captions = read_captions(folder.path / "predictions" / N_BEST.format(split))
            reasons = content["splits"][split]["unreadable"]
            image_ids = part.source_ids()
            id_of = {str(image): image for image in image_ids}  # because keys in JSON are texts
            captions |= {id_of.get(text, text): ImageCaption(error=str(reason)) for text, reason in reasons.items()}
            if captions.keys() != set(image_ids):
                return None
            found[split] = {image: captions[image] for image in image_ids}
        return found
    except (DamagedError, UserError) as error:
        damage = str(error).partition(";")[0]
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        damage = f"{path} or its captions are damaged"
    logger.warning(f"damaged   {damage}; the images are captioned again")
    return None


def validation_by_stage(folder: RunFolder) -> dict[str, float]:
    """Validation CIDEr-D by stage name, computed from the captions that each stage's best weights have made."""
    config, values = folder.config, {}
    part = folder.dataset.split(config.data.val_split)
    for stage in config.stages:
        path = folder.stage(stage.name) / "predictions-val.json"
        if path.is_file():
            scores = caption_scores(read_predictions(path), part, ("CIDEr-D",), config)
            value = None if scores is None else scores.values["CIDEr-D"]
            if value is not None:
                values[stage.name] = value
    return values


def run_page(page: Report, folder: RunFolder, by_stage: Mapping[str, float], durations: Mapping[str, float]) -> Report:
    """Adds the stages and the facts of a run to the page of its evaluation.

    page: from `evaluation.reports.report`. by_stage: from `validation_by_stage`. durations: of the run's steps in
    seconds, by name.
    """
    config, metadata = folder.config, folder.metadata
    facts = {
        "images": ", ".join(f"{split} {count}" for split, count in metadata.splits.items()),
        "seed": f"{config.seed}; the scores are of this seed only",
        "model": f"{config.model.name}, {metadata.parameters['model']:,} parameters",
        "features": describe_features(config, metadata.num_tokens, metadata.parameters["backbone"]),
        "durations": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in durations.items()),
        "commit": metadata.commit,
        "data fingerprint": metadata.data_fingerprint[:16],
        "versions": ", ".join(f"{name} {version}" for name, version in metadata.versions.items()),
    }
    return replace(
        page, stages=[_report_stage(folder, stage.name, by_stage) for stage in config.stages], metadata=facts
    )


def _report_stage(folder: RunFolder, name: str, validation: Mapping[str, float]) -> ReportStage:
    """The curves and the results of one stage for the report. validation: CIDEr-D by stage name."""
    curves: dict[str, list[tuple[int, float]]] = {}
    entries = [entry for entry in read_journal(folder.journal) if entry["stage"] == name]
    for (kind, key), label in CURVE_LABELS.items():
        points = [(entry["step"], entry[key]) for entry in entries if entry["kind"] == kind and key in entry]
        if points:
            curves[label] = points
    result = folder.result(name)
    summary = {} if result is None else {"steps": str(result.steps), "best at step": str(result.best_step)}
    if name in validation:
        summary["validation CIDEr-D"] = f"{validation[name]:.4f}"
    return ReportStage(name, curves, summary)
