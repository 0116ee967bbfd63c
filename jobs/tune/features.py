"""Features for a search: the backbone found or trained, and every image extracted once, before the first trial."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.load import parse_config, set_value
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features.source import feature_source
from pipeline.runs.folder import RunFolder
from pipeline.runs.identity import run_identity
from pipeline.runtime.log import indented
from pipeline.search.spec import Search, flatten

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackboneSource:
    """A file of the backbone as runs keep it, and the same in timm's names, for configurations of trials.

    Trials name the file, so that those of several seeds have the same backbone.
    """

    weights: Path
    start: Path


def find_backbone(search: Search, dataset: Dataset, address: str | None) -> BackboneSource | None:
    """The backbone that `backbone.weights` names; trained here when it asks for a run's and there is none.

    None where features come from a file.
    """
    section, base = search.config.backbone, search.base
    if not base.has_backbone:
        if section.weights != "base":
            raise UserError(
                f"backbone.weights is {section.weights}, and {search.config.base} has region features from "
                "features.hdf5 and no backbone; leave it out"
            )
        return None
    if section.weights == "base":
        return _source(_started(base), base)
    if section.weights != "run":
        path = Path(section.weights).expanduser()
        if not path.is_file():
            raise UserError(f"backbone.weights: {path} is no file; give one, or base, or run")
        config = base.model_copy(update={"backbone": replace(base.backbone, weights=str(path.resolve()))})
        return _source(_started(config), base)
    run = RunFolder(base.storage_path / "runs" / run_identity(base, dataset.fingerprint()))
    if _is_trained(run, base):
        logger.info(f"backbone  as the run {run.run_id} ended with it")
    else:
        config = _stand_in(search)
        run = RunFolder(config.storage_path / "runs" / run_identity(config, dataset.fingerprint()))
        there = "is there" if _is_trained(run, config) else "is trained now"
        stages = ", ".join(f"{stage.name} ({stage.epochs:g} epochs)" for stage in config.stages)
        logger.info(
            f"backbone  no finished run of {search.config.base} in {base.storage_path}; a stand-in {there}: {stages}"
        )
        if not _is_trained(run, config):
            from jobs.run import train

            with indented():
                run = train(config, address)
    return _source(run.weights_before(None, "backbone"), base)


def _is_trained(run: RunFolder, config: RunConfig) -> bool:
    """Every stage that trains the backbone is over."""
    stages = [stage for stage in config.stages if stage.train_backbone]
    return bool(stages) and all(run.result(stage.name) for stage in stages)


def _stand_in(search: Search) -> RunConfig:
    """The base's stages up to the first that trains the backbone (or those named), with the section's changes."""
    section, values = search.config.backbone, copy.deepcopy(search.values)
    names = [stage.name for stage in search.base.stages]
    trained = [stage.name for stage in search.base.stages if stage.train_backbone]
    if not trained:
        raise UserError("backbone.weights is run, and no stage of the base configuration trains it; set it to base")
    for name in section.stages:
        if name not in names:
            raise UserError(f"backbone.stages: the base configuration has no {name!r}; it has {', '.join(names)}")
    wanted = section.stages or tuple(names[: names.index(trained[0]) + 1])
    if not set(wanted) & set(trained):
        raise UserError(f"backbone.stages: none of {', '.join(wanted)} trains the backbone; {', '.join(trained)} do")
    values["stages"] = [stage for stage in values["stages"] if stage["name"] in wanted]
    for key, value in flatten(section.set).items():
        set_value(values, key, value, "backbone.set")
    values["name"] = f"{search.base.name}-backbone"  # searches with the same base share it
    values["tracking"] = {"enabled": False}
    return parse_config(values)


def _started(config: RunConfig) -> Path:
    from jobs.extract import initial_weights

    return initial_weights(config, config.storage_path / "backbones")


def _source(weights: Path, base: RunConfig) -> BackboneSource:
    from pipeline.runtime.weights import export_backbone, weights_file_digest

    start = base.storage_path / "backbones" / f"{weights_file_digest(weights)[:20]}-timm.safetensors"
    if not start.is_file():
        export_backbone(weights, start)
    return BackboneSource(weights, start)


def extract_once(
    search: Search, dataset: Dataset, source: BackboneSource | None, start_ray: Callable[[], None]
) -> tuple[str | None, list[str]]:
    """The store with features of all images that trials read, and the keys of images that gave none.

    None when every stage of a trial works on images. UserError when too many images give none.
    """
    config = search.base
    if all(config.stage(name).train_backbone for name in search.stages):
        return None, []
    part = dataset.split(*config.data.train_splits, config.data.val_split)
    extracted = feature_source(config).extract(part, None if source is None else source.weights, start_ray)
    extracted.require_enough(len(part), config)
    return str(extracted.store), sorted(extracted.missing)
