"""The images and captions that a configuration names: the embedded set drawn, annotations read, content keys found.

No torch here: `check`, and an extraction with nothing to do, are over before it would be imported.
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
    build_vocabulary(dataset, config.data)  # refuse an empty one before reading images
    return snapshot_of(dataset, config)


def read_data(config: RunConfig) -> Dataset:
    """The annotations, fit to train on; the embedded data set is drawn when it is not there yet."""
    data = config.data
    return read_dataset(data, data_root(config), config.storage.options)


def data_root(config: RunConfig) -> str:
    """The folder or s3:// prefix of the data set; the embedded one is drawn when it is not there yet."""
    data = config.data
    if data.synthetic is not None:
        digest = hashlib.sha256(json.dumps(asdict(data.synthetic), sort_keys=True).encode()).hexdigest()[:10]
        name = f"data/scenes-{digest}"
        root, home = config.working_path / name, config.home(name)
        if home is not None and (home / MARKER).exists():
            return home.uri
        if not root.is_dir():
            logger.info(f"drawing {data.synthetic.num_images} scenes into {home or root}")
        write_dataset(root, data.synthetic)
        if home is not None:
            Mirror(home, root).push()
            return home.uri
        return str(root)
    return storage_path(str(data.root)).uri


def snapshot_of(dataset: Dataset, config: RunConfig) -> tuple[Dataset, dict[str, str]]:
    """Content keys from the storage's manifest for this data set, which is brought up to date.

    Where features come from a file, images are keyed by their id: the photographs themselves need not be here.
    """
    if not config.has_backbone:
        return dataset.keyed_by_id(), {}
    root = "" if config.data.root is None else storage_path(config.data.root).uri
    named = f"{root} {config.data.model_dump_json(include={'images', 'sources', 'synthetic'})}"
    name = hashlib.sha256(named.encode()).hexdigest()[:16]
    return take_snapshot(dataset, config.storage_place / f"manifests/{name}.parquet", config.storage.options)
