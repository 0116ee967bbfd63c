"""Features for a search: finds the backbone and extracts every image once, before the first trial."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from raycap.jobs.extract import initial_weights
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.extraction import StartRay, extract_features
from raycap.pipeline.runs.prepare import open_run
from raycap.pipeline.search.spec import Search
from raycap.pipeline.storage.weights import weights_file_digest

logger = logging.getLogger(__name__)


def find_backbone(search: Search, dataset: Dataset) -> Path | None:
    """The file with the backbone that the key `backbone` names, or None if the base configuration has none.

    Raises UserError if it is that of a run of the base configuration and no such run has trained it.
    """
    base, name = search.base, search.config.backbone
    if not base.has_backbone:
        return None
    if name == "run":
        run = open_run(base, dataset.fingerprint())
        trained = [stage for stage in base.stages if stage.train_backbone]
        if not all(run.result(stage.name) for stage in trained):
            raise UserError(
                f"backbone is run, and no run of {search.config.base} in {base.storage.uri} has trained its backbone; "
                "train it first with `raycap run`, with --set for what the search sets, or set backbone to base"
            )
        logger.info(f"backbone  from the run {run.run_id}")
        return run.weights_after(trained[-1], "backbone")
    file = base.backbone.weights if name == "base" else str(Path(name).expanduser().resolve())
    config = base.model_copy(update={"backbone": replace(base.backbone, weights=file)})
    return initial_weights(config, base.working_path / "backbones")


def share_backbone(search: Search, weights: Path) -> str:
    """The path or URI of the backbone's file for trials on all machines. Uploads the file to a storage on S3."""
    place = search.base.storage_place
    if not place.is_remote:
        return str(weights)
    stored = place / f"backbones/{weights_file_digest(weights)[:20]}.safetensors"
    if not stored.exists():
        stored.upload(weights)
    return str(stored)


def require_backbone_file(search: Search) -> None:
    """Raises UserError if the key `backbone` of a search does not go with its base, or names no file."""
    weights = search.config.backbone
    if weights == "base":
        return
    if not search.base.has_backbone:
        raise UserError(
            f"backbone is {weights}, but {search.config.base} reads region features from features.hdf5 and has no "
            "backbone; remove this key"
        )
    if weights == "run":
        if not any(stage.train_backbone for stage in search.base.stages):
            raise UserError("backbone is run, and no stage of the base configuration trains it; set it to base")
    elif not (path := Path(weights).expanduser()).is_file():
        raise UserError(f"backbone: {path} is no file; give a file, base or run")


def extract_once(
    search: Search, dataset: Dataset, weights: Path | None, start_ray: StartRay
) -> tuple[str | None, list[str]]:
    """The folder with the features of all images whose features trials read, and the keys of images without features.

    The folder is None when every stage of a trial reads images. UserError when too many images have no features.
    """
    config = search.base
    if all(config.stage(name).train_backbone for name in search.stages):
        return None, []
    stored = config.data.train_splits if config.features.store == "always" else ()
    part = dataset.split(*stored, config.data.val_split, search.score_split)
    extracted = extract_features(config, part, weights, start_ray)
    extracted.require_enough(len(part), config)
    return str(extracted.store), sorted(extracted.missing)
