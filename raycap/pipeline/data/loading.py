"""Finds the images and captions that a configuration names, and their content keys.

This module does not import torch: the import would take longer than all the work of `raycap check`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.content_keys import HashFiles, hash_with_threads, take_snapshot
from raycap.pipeline.data.dataset import Dataset, build_vocabulary, read_dataset
from raycap.pipeline.data.synthetic.scenes import MARKER, write_annotations, write_dataset
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import StoragePath, storage_path

logger = logging.getLogger(__name__)


def find_data(config: RunConfig, hash_files: HashFiles | None = None) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {path: reason} of images that cannot be read. hash_files: `take_snapshot`."""
    dataset = read_data(config)
    build_vocabulary(dataset, config.data)  # raises UserError for an empty vocabulary before any image is read
    return snapshot_of(dataset, config, hash_files)


def read_data(config: RunConfig) -> Dataset:
    """The data set without content keys, checked for training; a missing synthetic data set is written first."""
    return read_dataset(config.data, data_root(config), config.storage.options)


def data_root(config: RunConfig) -> str:
    """The folder or s3:// prefix of the data set; a missing synthetic data set is written first."""
    scenes = config.data.synthetic
    if scenes is None:
        return storage_path(str(config.data.root)).uri
    root, remote = _synthetic_places(config, scenes)
    if remote is None or not (remote / MARKER).exists():
        if not root.is_dir():
            logger.info(f"writing the synthetic data set, {scenes.num_images} images, to {remote or root}")
        write_dataset(root, scenes)
        if remote is not None:
            Mirror(remote, root).push()
    return str(root) if remote is None else remote.uri


def planned_data(config: RunConfig) -> Dataset | None:
    """A synthetic data set that is not drawn yet, without its images; None for any other.

    Raises UserError if it cannot be trained on with this configuration.
    """
    scenes = config.data.synthetic
    if scenes is None or _synthetic_places(config, scenes)[0].is_dir():
        return None
    with TemporaryDirectory(prefix="raycap-") as folder:
        write_annotations(Path(folder), scenes)
        dataset = read_dataset(config.data, folder)
    build_vocabulary(dataset, config.data)
    return dataset


def _synthetic_places(config: RunConfig, scenes: SceneConfig) -> tuple[Path, StoragePath | None]:
    """The local folder of a synthetic data set, and its place on S3; None for a local storage."""
    digest = hashlib.sha256(json.dumps(scenes.values(), sort_keys=True).encode()).hexdigest()[:10]
    name = f"data/synthetic-{digest}"
    return config.working_path / name, config.home(name)


def snapshot_of(
    dataset: Dataset, config: RunConfig, hash_files: HashFiles | None = None, listing: pa.Table | None = None
) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {URI: reason} of unreadable images; updates the data set's manifest.

    hash_files, listing: of `take_snapshot`. With region features from a file the images need not exist, and their ids
    are the content keys.
    """
    if not config.has_backbone:
        return dataset.keyed_by_id(), {}
    root = "" if config.data.root is None else storage_path(config.data.root).uri
    keys = {"images", "sources", "synthetic"}
    image_source = f"{root} {config.data.model_dump_json(include=keys)}"
    name = hashlib.sha256(image_source.encode()).hexdigest()[:16]
    manifest = config.storage_place / f"manifests/{name}.parquet"
    hash_files = hash_files or partial(hash_with_threads, cache_bytes=config.features.cache_bytes)
    return take_snapshot(dataset, manifest, config.storage.options, hash_files, listing)
