"""Finds the images and captions that a configuration names, and their content keys.

This module does not import torch: the import would take longer than all the work of `raycap check`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict

from pipeline.config.run import RunConfig
from pipeline.data.content_keys import take_snapshot
from pipeline.data.dataset import Dataset, build_vocabulary, read_dataset
from pipeline.data.synthetic import MARKER, write_dataset
from pipeline.storage.mirror import Mirror
from pipeline.storage.path import storage_path

logger = logging.getLogger(__name__)


def find_data(config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {path: reason} of images that cannot be read."""
    dataset = read_data(config)
    build_vocabulary(dataset, config.data)  # raises UserError for an empty vocabulary before any image is read
    return snapshot_of(dataset, config)


def read_data(config: RunConfig) -> Dataset:
    """The data set without content keys, checked for training; a missing synthetic data set is written first."""
    return read_dataset(config.data, data_root(config), config.storage.options)


def data_root(config: RunConfig) -> str:
    """The folder or s3:// prefix of the data set; a missing synthetic data set is written first."""
    data = config.data
    if data.synthetic is not None:
        digest = hashlib.sha256(json.dumps(asdict(data.synthetic), sort_keys=True).encode()).hexdigest()[:10]
        name = f"data/synthetic-{digest}"
        root, remote = config.working_path / name, config.home(name)
        if remote is not None and (remote / MARKER).exists():
            return remote.uri
        if not root.is_dir():
            logger.info(f"writing the synthetic data set, {data.synthetic.num_images} images, to {remote or root}")
        write_dataset(root, data.synthetic)
        if remote is not None:
            Mirror(remote, root).push()
            return remote.uri
        return str(root)
    return storage_path(str(data.root)).uri


def snapshot_of(dataset: Dataset, config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """The data set with content keys, and {URI: reason} of unreadable images; updates the data set's manifest.

    With region features from a file the images need not exist, and their ids are the content keys.
    """
    if not config.has_backbone:
        return dataset.keyed_by_id(), {}
    root = "" if config.data.root is None else storage_path(config.data.root).uri
    image_source = f"{root} {config.data.model_dump_json(include={'images', 'sources', 'synthetic'})}"
    name = hashlib.sha256(image_source.encode()).hexdigest()[:16]
    return take_snapshot(dataset, config.storage_place / f"manifests/{name}.parquet", config.storage.options)
