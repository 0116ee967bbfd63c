"""The features of a configuration: a backbone computes them from image files, or a detector's file contains them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.content_keys import HashedFiles, HashFiles, hash_with_threads
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.extraction import Extractor, StartRay, extract, hashing_extraction
from raycap.pipeline.features.measured_precision import extraction_precision
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.storage.path import StorageOptions, StoragePath

if TYPE_CHECKING:
    from raycap.models.encoders.transform import ImageTransform

logger = logging.getLogger(__name__)


class Extracted(NamedTuple):
    """A feature store, and {content key: reason} of images without usable features."""

    store: StoragePath
    missing: dict[str, str]

    def require_enough(self, num_images: int, config: RunConfig) -> None:
        """Raises UserError when more than `data.max_bad_fraction` of the images have no features."""
        if len(self.missing) > config.data.max_bad_fraction * num_images:
            reason = next(iter(self.missing.values()))
            raise UserError(
                f"{len(self.missing)} of {num_images} images give no features, more than data.max_bad_fraction = "
                f"{config.data.max_bad_fraction}; {self.store / 'quarantine.parquet'} lists them (first: {reason})"
            )


def extract_features(
    config: RunConfig,
    dataset: Dataset,
    weights: Path | None,
    start_ray: StartRay,
    unreadable: dict[str, str] | None = None,
    transform: ImageTransform | None = None,
) -> Extracted:
    """Adds the features of the data set's images that the store lacks.

    With `features.views`, an image of a training split has features of its views, and of the image itself only if its
    split is used otherwise, too. weights: the file of the backbone's weights; None without a backbone. start_ray: see
    `extract`. unreadable: {URI: reason} of images without a content key, which the quarantine lists. transform: that a
    bundle records, in place of the backbone's.
    """
    if not config.has_backbone:
        return Extracted(*import_regions(dataset, config))
    assert weights is not None
    rows, extractor = with_views(dataset, config), _extractor(config, weights, start_ray, transform)
    return Extracted(*extract(rows, config.storage_place / "features", extractor, start_ray, unreadable))


def hash_and_extract(
    config: RunConfig, weights: Callable[[], Path], start_ray: StartRay, transform: ImageTransform | None = None
) -> HashFiles:
    """What reads new files for `find_data`: an extraction on Ray if there are many, else threads.

    Threads also read the files if the configuration has `features.views`, whose keys contain the content keys. weights:
    gives the file of the backbone's weights. weights and start_ray (see `extract`) are called only for an extraction.
    transform: see `extract_features`.
    """

    def hash_files(uris: pa.ChunkedArray, options: StorageOptions) -> Iterator[HashedFiles]:
        if config.features.views or len(uris) <= config.features.max_images_for_tasks:
            return hash_with_threads(uris, options)
        extractor = _extractor(config, weights(), start_ray, transform)
        return hashing_extraction(config.storage_place / "features", extractor, start_ray)(uris, options)

    return hash_files


def _extractor(
    config: RunConfig, weights: Path, start_ray: StartRay, transform: ImageTransform | None = None
) -> Extractor:
    """The extractor of a configuration with a backbone. The arguments are those of `extract_features`."""
    backbone = replace(config.backbone, weights="none")
    dtype = extraction_precision(backbone, config.features, config.storage_place / "precision", start_ray)
    settings = config.features.model_copy(update={"compute_dtype": dtype})
    return Extractor(backbone, weights, settings, config.data.max_pixels, config.storage.options, transform)


def with_views(dataset: Dataset, config: RunConfig) -> Dataset:
    """The rows of an extraction: the images, and in place of training images their views if the configuration has any.

    With views, the result has only the columns key and uri. The driver needs memory for `features.views` rows of them
    per training image.
    """
    views = config.features.training_views
    if views is None:
        return dataset
    data = config.data
    unchanged = {data.val_split, *data.test_splits}
    keys = [
        ([] if split in data.train_splits and split not in unchanged else [key])
        + (views.keys(key) if split in data.train_splits and key is not None else [])
        for key, split in zip(dataset.column("key"), dataset.column("split"), strict=True)
    ]
    rows = dataset.table.select(["uri", "key"])
    rows = rows.take(pa.array(np.repeat(np.arange(len(keys)), [len(each) for each in keys])))
    return Dataset(rows).with_column("key", pa.array([key for each in keys for key in each], pa.string()))


def features_for_bundles(config: RunConfig, dataset: Dataset) -> tuple[Dataset, StoragePath | None]:
    """The images that a bundle can caption, and the store with their features.

    The store is None when the bundle contains a backbone, which reads the image files.
    """
    if config.has_backbone:
        return dataset, None
    dataset = dataset.keyed_by_id()
    store, missing = import_regions(dataset, config)
    if missing:
        logger.info(f"features  {len(missing)} images are left out: {store / 'quarantine.parquet'} says why")
    return dataset.without(sorted(missing)), store


def describe_features(config: RunConfig, num_tokens: int, num_parameters: int) -> str:
    """The source of the features in words. num_tokens: N of the features. num_parameters: those of the backbone."""
    if not config.has_backbone:
        return f"regions of {config.features.hdf5}, at most {num_tokens}"
    backbone = config.backbone
    return f"{backbone.name} at {backbone.image_size} px, {num_parameters:,} parameters, {num_tokens} tokens"
