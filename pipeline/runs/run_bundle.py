"""A run's model as a bundle: as the run ended, or as it was after one of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from models.backbone import Backbone
from models.captioner import Captioner
from models.registry import build_model
from pipeline.captioning.bundle import save_bundle
from pipeline.config.sections import StageSection
from pipeline.runs.folder import RunFolder
from pipeline.runtime.weights import load_weights
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import StoragePath, storage_path


def bundle_path(folder: RunFolder, stage: StageSection | None = None) -> Path:
    """models/NAME/RUN under the storage, or models/NAME/RUN-STAGE."""
    name = folder.run_id if stage is None else f"{folder.run_id}-{stage.name}"
    return folder.config.working_path / "models" / folder.config.name / name


def bundle_place(folder: RunFolder, stage: StageSection | None = None) -> StoragePath:
    """Where the bundle lies for everybody."""
    path = bundle_path(folder, stage)
    return folder.config.home(path.relative_to(folder.config.working_path).as_posix()) or storage_path(path)


def local_bundle(folder: RunFolder) -> Path:
    """The bundle of a finished run as a local folder, fetched when it is on S3."""
    path, shown = bundle_path(folder), bundle_place(folder)
    if shown.is_remote:
        Mirror(shown, path).pull()
    return path


def bundle_run(folder: RunFolder, stage: StageSection | None = None, scores: Mapping[str, float] | None = None) -> Path:
    """Writes the bundle and returns its folder. `stage`: the best weights of that stage, kept by the run or not."""
    config = folder.config
    model = build_model(config.model, folder.sizes)
    backbone: Backbone | None = None
    parts: list[tuple[nn.Module, str]] = [(model, "model")]
    if config.has_backbone:
        backbone = Backbone(replace(config.backbone, weights="none"))
        parts.append((backbone, "backbone"))
    for module, part in parts:
        weights = folder.weights_before(None, part) if stage is None else folder.weights_after(stage, part)
        load_weights(module, weights)
    info = {"run": folder.run_id, "commit": folder.facts["commit"], **({} if stage is None else {"stage": stage.name})}
    info |= {key: round(value, 4) for key, value in (scores or {}).items()}
    target = bundle_path(folder, stage)
    save_bundle(target, Captioner(model, backbone), folder.vocabulary, name=config.name, info=info)
    shown = bundle_place(folder, stage)
    if shown.is_remote:
        Mirror(shown, target).push()
    return target
