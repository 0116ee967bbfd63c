"""`raycap extract`: writes the features of a data set to the feature store. `--verify` reads the whole store back."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from raycap.jobs.options import Address, Config, Set
from raycap.pipeline.cluster.start import check_resources, start_extraction, with_processors
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import read_data, snapshot_of
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.extraction import extract_features, with_views
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.runs.preflight import check_before_writing, initial_backbone
from raycap.pipeline.storage.atomic import atomic_path
from raycap.pipeline.storage.weights import save_weights, weights_file_digest

logger = logging.getLogger(__name__)


def extract(
    config: Config,
    set_: Set = None,
    address: Address = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole store back and compare digests.")] = False,
) -> int:
    """Compute the features of a data set.

    The features of the configuration's backbone go to the feature store. Images that the store contains already are
    not computed again. The exit code is 1 when too many images give no features, or --verify finds damage.

    Example: raycap extract photos --set data.root=/path/to/folder --verify
    """
    begin = time.monotonic()
    run_config = with_processors(load_config(config, set_ or ()), address)
    check_resources(run_config, address)
    check_before_writing(run_config)
    dataset = _with_stored_features(read_data(run_config), run_config)
    logger.info(f"data         {len(dataset)} images in {len(dataset.split_sizes())} splits")
    start = partial(start_extraction, run_config, address)
    with TemporaryDirectory(prefix="raycap-") as scratch:
        weights = initial_weights(run_config, Path(scratch)) if run_config.has_backbone else None
        dataset, unreadable = snapshot_of(dataset, run_config)
        if unreadable and not len(dataset.readable()):  # if all files fail, the path is probably wrong
            uri, reason = next(iter(unreadable.items()))
            raise UserError(f"none of the {len(dataset)} images can be read; check data.images: {uri}: {reason}")
        extracted = extract_features(run_config, dataset, weights, start, unreadable)
    store = FeatureStore(extracted.store)
    logger.info(f"store        {extracted.store}: {len(store)} images in {len(store.shards)} shards")
    with_features = dataset.without(sorted(extracted.missing)).readable()
    num_bad = len(dataset.readable()) - len(with_features) + len(unreadable)
    exit_code = 0
    if num_bad:
        first = next(iter(extracted.missing.values()), "") or next(iter(unreadable.values()))
        logger.info(f"quarantine   {num_bad} of {len(dataset)} images gave no features (first: {first}):")
        logger.info(f"             {extracted.store / 'quarantine.parquet'}")
    if num_bad > run_config.data.max_bad_fraction * len(dataset):
        logger.info(f"failed       that is more than data.max_bad_fraction = {run_config.data.max_bad_fraction}")
        exit_code = 1
    if verify and not _verify(store, with_features, run_config):
        exit_code = 1
    logger.info(f"finished in {time.monotonic() - begin:.1f} s")
    return exit_code


def _with_stored_features(dataset: Dataset, config: RunConfig) -> Dataset:
    """The images whose features are stored. If `features.store` is never, training images are not among them."""
    if config.features.store != "never":
        return dataset
    logger.info("features     of training images are computed during training, because features.store is never")
    scored = (config.data.val_split, *config.data.test_splits)
    splits = [split for split in dataset.split_sizes() if split in scored or split not in config.data.train_splits]
    return dataset.split(*splits)


def _verify(store: FeatureStore, dataset: Dataset, config: RunConfig) -> bool:
    """Reads the whole store. Returns False if a shard is damaged, or the store lacks an image of the data set."""
    damages = store.verify()
    num_missing = int((~store.contains(with_views(dataset, config).table["key"])).sum())
    for damage in damages:
        logger.info(f"damaged      {damage}")
    num_whole = len(store.shards) - len(damages)
    logger.info(f"verify       {num_whole} of {len(store.shards)} shards are whole, {num_missing} images are missing")
    return not damages and not num_missing


def initial_weights(config: RunConfig, scratch: Path) -> Path:
    """The file with the initial weights of the configuration's backbone. Makes the file if it does not exist yet.

    The storage keeps the file, because building a backbone can take longer than the rest of the command if all features
    are stored. If the storage is on S3, the returned file is a copy in `scratch`. The file's name is a digest of
    everything that determines the weights.
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "timm")]
    file = config.backbone.weights
    content = "" if file in ("none", "pretrained") else weights_file_digest(Path(file).expanduser())
    identity = [asdict(config.backbone), config.seed, versions, content]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    stored = config.storage_place / f"backbones/{digest}.safetensors"
    path = scratch / stored.name if stored.is_remote else stored.path
    if not stored.exists():
        save_weights(initial_backbone(config), path)
        if stored.is_remote:
            stored.upload(path)
    elif stored.is_remote:
        with atomic_path(path, durable=False) as temporary:
            stored.download(temporary)
    return path
