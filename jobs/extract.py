"""`raycap extract`: features of a data set into the feature store, and `--verify`, which reads everything back."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.cluster import start_ray
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features.source import Extracted, feature_source
from pipeline.features.store import FeatureStore
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


def extract(config: RunConfig, address: str | None = None, verify: bool = False) -> int:
    """Features of every split by the configuration's backbone (or from its HDF5 file). Returns the exit code.

    1 when more than `data.max_bad_fraction` of the images give none, or `verify` finds damage; UserError before
    anything is computed for what the user can mend.
    """
    from pipeline.data.loading import read_data, snapshot_of

    begin = time.monotonic()
    dataset = read_data(config)
    logger.info(f"data         {len(dataset)} images in {len(set(dataset.column('split')))} splits")
    dataset, unreadable = snapshot_of(dataset, config)
    folder, bad = _extract(dataset, unreadable, config, address)
    store = FeatureStore(folder)
    logger.info(f"store        {folder}: {len(store)} images in {len(store.shards)} shards")
    code = _verdict(dataset, bad, unreadable, config, folder)
    if verify:
        damaged = store.verify()
        lost = int((~store.contains(dataset.without(sorted(bad)).known().table["key"])).sum())
        for sentence in damaged:
            logger.info(f"damaged      {sentence}")
        logger.info(
            f"verify       {len(store.shards) - len(damaged)} of {len(store.shards)} shards are whole, "
            f"{lost} images are not there"
        )
        code = 1 if damaged or lost else code
    logger.info(f"finished in {time.monotonic() - begin:.1f} s")
    return code


def _extract(dataset: Dataset, unreadable: dict[str, str], config: RunConfig, address: str | None) -> Extracted:
    _refuse_when_unusable(dataset, unreadable, config)
    with TemporaryDirectory(prefix="raycap-") as scratch:
        weights = initial_weights(config, Path(scratch)) if config.has_backbone else None
        return feature_source(config).extract(dataset, weights, lambda: start_ray(config, address), unreadable)


def initial_weights(config: RunConfig, scratch: Path) -> Path:
    """The file with the weights that the configuration's backbone starts from.

    It is kept in the storage, named by what decides it: building a backbone to find that all its features are there
    would take longer than all the rest.
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "timm")]
    named = json.dumps([asdict(config.backbone), config.seed, versions, _state_of_file(config)], sort_keys=True)
    kept = config.storage_place / f"backbones/{hashlib.sha256(named.encode()).hexdigest()[:20]}.safetensors"
    path = scratch / kept.name if kept.is_remote else kept.path
    if kept.exists():
        if kept.is_remote:
            path.write_bytes(kept.read_bytes())
        return path
    from pipeline.runs.prepare import initial_backbone
    from pipeline.runtime.weights import save_weights

    save_weights(initial_backbone(config), path)
    if kept.is_remote:
        kept.write_bytes(path.read_bytes())
    return path


def _state_of_file(config: RunConfig) -> list[int]:
    """Size and modification time of a weights file that the configuration names."""
    if config.backbone.weights in ("none", "pretrained"):
        return []
    try:
        status = Path(config.backbone.weights).stat()
    except OSError as error:
        raise UserError(f"backbone.weights: {config.backbone.weights} cannot be read: {error.strerror}") from error
    return [status.st_size, status.st_mtime_ns]


def _refuse_when_unusable(dataset: Dataset, unreadable: dict[str, str], config: RunConfig) -> None:
    """Nothing readable at all is a wrong path, not a damaged data set."""
    if len(unreadable) and len(dataset.known()) == 0:
        uri, reason = next(iter(unreadable.items()))
        raise UserError(f"none of the {len(dataset)} images can be read; check data.images: {uri}: {reason}")


def _verdict(
    dataset: Dataset,
    bad: dict[str, str],
    unreadable: dict[str, str],
    config: RunConfig,
    folder: StoragePath,
) -> int:
    troubled = len(dataset.known()) - len(dataset.without(sorted(bad)).known()) + len(unreadable)
    if not troubled:
        return 0
    first = next(iter(bad.values()), "") or next(iter(unreadable.values()))
    logger.info(f"quarantine   {troubled} of {len(dataset)} images gave no features (first: {first}):")
    logger.info(f"             {folder / 'quarantine.parquet'}")
    if troubled > config.data.max_bad_fraction * len(dataset):
        logger.info(f"failed       that is more than data.max_bad_fraction = {config.data.max_bad_fraction}")
        return 1
    return 0
