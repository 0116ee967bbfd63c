"""Where the features of a run come from: a backbone over the image files, or a file of a detector's region features."""

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
        """Features of every image of the data set that the store lacks.

        weights: the backbone's, None without a backbone. start_ray is called only when there is something to compute.
        unreadable: {URI: reason} of images without a content key, for the quarantine's list.
        """

    @abstractmethod
    def for_bundles(self, dataset: Dataset) -> tuple[Dataset, StoragePath | None]:
        """What bundles caption: the images that can be captioned, and the store with their features.

        No store where bundles bring their backbone and read the image files.
        """

    @abstractmethod
    def describe(self, num_tokens: int, num_parameters: int) -> str:
        """One line for people. num_parameters: the backbone's."""


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
    """Region features that a detector wrote to `features.hdf5`. Images are keyed by their id."""

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
