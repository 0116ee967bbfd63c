"""Features for a search: finds or trains the backbone and extracts every image once, before the first trial."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from raycap.jobs.extract import initial_weights
from raycap.jobs.run import train
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.extraction import StartRay, extract_features
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.prepare import open_run
from raycap.pipeline.runtime.log import indented
from raycap.pipeline.search.spec import Search, set_values
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.weights import export_backbone, weights_file_digest

logger = logging.getLogger(__name__)

BACKBONE_LEASE_S = 120.0  # how long a killed search keeps others from training the stand-in


@dataclass(frozen=True)
class BackboneSource:
    """Two files with the same backbone: `weights` as runs store it, `start` with timm's names.

    Trials start from `start`, so that trials with different seeds share one backbone.
    """

    weights: Path
    start: str


def find_backbone(search: Search, dataset: Dataset, address: str | None) -> BackboneSource | None:
    """The backbone that `backbone.weights` names. A stand-in is trained if it names the backbone of a missing run.

    Returns None if the base configuration reads its features from an HDF5 file and has no backbone.
    """
    section, base = search.config.backbone, search.base
    require_backbone_file(search)
    if not base.has_backbone:
        return None
    config = base
    if section.weights not in ("base", "run"):
        path = Path(section.weights).expanduser()
        config = base.model_copy(update={"backbone": replace(base.backbone, weights=str(path.resolve()))})
    if section.weights != "run":
        return _source(initial_weights(config, base.working_path / "backbones"), base)
    run = open_run(base, dataset.fingerprint())
    if _is_trained(run, base):
        logger.info(f"backbone  from the finished run {run.run_id}")
    else:
        config = _stand_in(search)
        run = open_run(config, dataset.fingerprint())
        trained = _is_trained(run, config)
        stages = ", ".join(f"{stage.name} ({stage.epochs:g} epochs)" for stage in config.stages)
        logger.info(
            f"backbone  no finished run of {search.config.base} in {base.storage.uri}; "
            f"a stand-in {'exists' if trained else 'is trained now'}: {stages}"
        )
        if not trained:
            run = _train_stand_in(config, run, dataset, address)
    last = [stage for stage in run.config.stages if stage.train_backbone][-1]
    return _source(run.weights_after(last, "backbone"), base)


def _train_stand_in(config: RunConfig, run: RunFolder, dataset: Dataset, address: str | None) -> RunFolder:
    """Trains a stand-in and returns its run. Searches with the same base share it.

    On S3 it waits as long as a search on another machine trains it. On a local storage the run's lock refuses a second
    process.
    """
    if run.home is None:
        with indented():
            return train(config, address)
    # beside the folder, because a push of the folder would replace a renewed lease by an older copy
    place = StoragePath(f"{run.home}.lease.json", run.home.options)
    while not isinstance(lease := take_lease(place, BACKBONE_LEASE_S), Lease):
        logger.info(f"backbone  {lease} trains the stand-in; this search waits for it")
    with lease, indented():
        run = open_run(config, dataset.fingerprint())  # another search may have trained it meanwhile
        return run if _is_trained(run, config) else train(config, address)


def require_backbone_file(search: Search) -> None:
    """Raises UserError if `backbone.weights` of a search does not go with its base, or names no file."""
    weights = search.config.backbone.weights
    if weights == "base":
        return
    if not search.base.has_backbone:
        raise UserError(
            f"backbone.weights is {weights}, but {search.config.base} reads region features from features.hdf5 and has "
            "no backbone; remove backbone.weights"
        )
    if weights == "run":
        _stand_in(search)
    elif not (path := Path(weights).expanduser()).is_file():
        raise UserError(f"backbone.weights: {path} is no file; give a file, base or run")


def _is_trained(run: RunFolder, config: RunConfig) -> bool:
    """Whether every stage that trains the backbone has ended."""
    stages = [stage for stage in config.stages if stage.train_backbone]
    return bool(stages) and all(run.result(stage.name) for stage in stages)


def _stand_in(search: Search) -> RunConfig:
    """The configuration of the run that trains a stand-in backbone.

    Its stages are `backbone.stages`, by default the base's stages up to the first that trains the backbone.
    """
    section, values = search.config.backbone, copy.deepcopy(search.values)
    names = [stage.name for stage in search.base.stages]
    trained = [stage.name for stage in search.base.stages if stage.train_backbone]
    if not trained:
        raise UserError("backbone.weights is run, and no stage of the base configuration trains it; set it to base")
    if unknown := [name for name in section.stages if name not in names]:
        raise UserError(f"backbone.stages: the base configuration has no {unknown[0]!r}; it has {', '.join(names)}")
    selected = section.stages or tuple(names[: names.index(trained[0]) + 1])
    if not set(selected) & set(trained):
        raise UserError(f"backbone.stages: none of {', '.join(selected)} trains the backbone; {', '.join(trained)} do")
    values["stages"] = [stage for stage in values["stages"] if stage["name"] in selected]
    set_values(values, section.set, "backbone.set")
    name = f"{search.base.name}-backbone"  # shared by searches with the same base
    return parse_config(values | {"name": name, "tracking": {"enabled": False}})


def _source(weights: Path, base: RunConfig) -> BackboneSource:
    """The source with these weights, which are exported under timm's names unless an earlier search did so."""
    start = base.working_path / "backbones" / f"{weights_file_digest(weights)[:20]}-timm.safetensors"
    if not start.is_file():
        export_backbone(weights, start)
    stored = base.storage_place / f"backbones/{start.name}"
    if stored.is_remote and not stored.exists():
        stored.upload(start)
    return BackboneSource(weights, str(stored))


def extract_once(
    search: Search, dataset: Dataset, source: BackboneSource | None, start_ray: StartRay
) -> tuple[str | None, list[str]]:
    """The folder with the features of all images whose features trials read, and the keys of images without features.

    The folder is None when every stage of a trial reads images. UserError when too many images have no features.
    """
    config = search.base
    if all(config.stage(name).train_backbone for name in search.stages):
        return None, []
    stored = config.data.train_splits if config.features.store == "always" else ()
    part = dataset.split(*stored, config.data.val_split, search.score_split)
    extracted = extract_features(config, part, None if source is None else source.weights, start_ray)
    extracted.require_enough(len(part), config)
    return str(extracted.store), sorted(extracted.missing)
