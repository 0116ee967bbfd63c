"""A run's model as a bundle: with the weights that it delivers, or those of one of its stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from raycap.models.config import Values
from raycap.pipeline.config.sections import StageSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import BUNDLE_FILES, read_confidences, require_intact, save_bundle
from raycap.pipeline.evaluation.comparison.protocol import run_protocol
from raycap.pipeline.evaluation.confidence import Confidence
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.weights import load_weights

logger = logging.getLogger(__name__)


def _bundle_path(folder: RunFolder, stage: StageSection | None = None) -> Path:
    """The local folder of a run's bundle, models/NAME/RUN below the storage, or of a stage's, models/NAME/RUN-STAGE."""
    name = folder.run_id if stage is None else f"{folder.run_id}-{stage.name}"
    return folder.config.working_path / "models" / folder.config.name / name


def bundle_place(folder: RunFolder, stage: StageSection | None = None) -> StoragePath:
    """The bundle's location as every machine sees it."""
    path = _bundle_path(folder, stage)
    return folder.config.home(path.relative_to(folder.config.working_path).as_posix()) or storage_path(path)


def local_bundle(folder: RunFolder) -> Path:
    """The bundle of a finished run as a local folder, downloaded when the run's storage is on S3."""
    path, location = _bundle_path(folder), bundle_place(folder)
    if location.is_remote:
        Mirror(location, path).pull(only=BUNDLE_FILES)
    return path


def stored_confidences(folder: RunFolder) -> tuple[Confidence, ...]:
    """The confidences in a run's bundle; () without a bundle, and for a damaged one, which the log names."""
    path = local_bundle(folder)
    try:
        require_intact(path)
        return read_confidences(path)
    except UserError as error:
        logger.warning(f"damaged   {str(error).partition(';')[0]}; the bundle is written again without its confidences")
        return ()


def bundle_run(
    folder: RunFolder,
    stage: StageSection | None = None,
    confidences: Sequence[Confidence] = (),
) -> Path:
    """Writes the bundle and returns its local folder.

    stage: bundle the best weights of this stage, even if the run did not keep it; None for what the run delivers.
    """
    from raycap.models.captioner import build_captioner

    config = folder.config
    captioner = build_captioner(config.model, folder.sizes, config.backbone if config.has_backbone else None)
    for part, module in captioner.named_children():  # "model" and, if there is one, "backbone"
        load_weights(module, folder.delivered_weights(part) if stage is None else folder.weights_after(stage, part))
    info: Values = {"run": folder.run_id, "commit": folder.metadata.commit}
    if stage is not None:
        info["stage"] = stage.name
    path, location = _bundle_path(folder, stage), bundle_place(folder, stage)
    protocol = run_protocol(config, stage or folder.delivered())
    about: Values = {"name": config.name, "protocol": protocol, "info": info, "confidences": confidences}
    save_bundle(path, captioner, folder.vocabulary, **about)
    if location.is_remote:
        Mirror(location, path).push()
    return path
