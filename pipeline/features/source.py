"""The source of a run's features: a backbone that reads the image files, or a file of region features."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features.extraction import Extractor, extract
from pipeline.features.regions import import_regions
from pipeline.storage.path import StoragePath

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


@dataclass(frozen=True)
class FeatureSource(ABC):
    """The source of the features that a configuration names."""

    config: RunConfig

    @abstractmethod
    def extract(
        self,
        dataset: Dataset,
        weights: Path | None,
        start_ray: Callable[[], None],
        unreadable: dict[str, str] | None = None,
    ) -> Extracted:
        """Adds the features of the data set's images that the store lacks.

        weights: the file of the backbone's weights; None without a backbone. start_ray: called only when features must
        be computed. unreadable: {URI: reason} of images without a content key, which the quarantine lists.
        """

    @abstractmethod
    def for_bundles(self, dataset: Dataset) -> tuple[Dataset, StoragePath | None]:
        """The images that a bundle can caption, and the store with their features.

        The store is None when the bundle contains a backbone, which reads the image files.
        """

    @abstractmethod
    def describe(self, num_tokens: int, num_parameters: int) -> str:
        """One line of text for the log. num_parameters: number of parameters of the backbone."""


class BackboneFeatures(FeatureSource):
    """Features that a backbone computes from the image files."""

    def extract(
        self,
        dataset: Dataset,
        weights: Path | None,
        start_ray: Callable[[], None],
        unreadable: dict[str, str] | None = None,
    ) -> Extracted:
        assert weights is not None
        config = self.config
        backbone, options = replace(config.backbone, weights="none"), config.storage.options
        extractor = Extractor(backbone, weights, config.features, config.data.max_pixels, options)
        return Extracted(*extract(dataset, config.storage_place / "features", extractor, start_ray, unreadable))

    def for_bundles(self, dataset: Dataset) -> tuple[Dataset, StoragePath | None]:
        return dataset, None

    def describe(self, num_tokens: int, num_parameters: int) -> str:
        backbone = self.config.backbone
        return f"{backbone.name} at {backbone.image_size} px, {num_parameters:,} parameters, {num_tokens} tokens"


class RegionFeatures(FeatureSource):
    """Region features that a detector wrote to `features.hdf5`. An image's content key is made from its id."""

    def extract(
        self,
        dataset: Dataset,
        weights: Path | None,
        start_ray: Callable[[], None],
        unreadable: dict[str, str] | None = None,
    ) -> Extracted:
        return Extracted(*import_regions(dataset, self.config))

    def for_bundles(self, dataset: Dataset) -> tuple[Dataset, StoragePath | None]:
        dataset = dataset.keyed_by_id()
        store, missing = import_regions(dataset, self.config)
        if missing:
            logger.info(f"features  {len(missing)} images are left out: {store / 'quarantine.parquet'} says why")
        return dataset.without(sorted(missing)), store

    def describe(self, num_tokens: int, num_parameters: int) -> str:
        return f"regions of {self.config.features.hdf5}, at most {num_tokens}"


def feature_source(config: RunConfig) -> FeatureSource:
    return BackboneFeatures(config) if config.has_backbone else RegionFeatures(config)
