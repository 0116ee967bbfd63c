"""Detector features into the feature store: a run reads them in place of a backbone's (`features.hdf5`).

Rows are padded with zeros to `features.max_regions`; the store keeps each one's length and boxes. Images are keyed by
their id, because the photographs themselves need not be here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import RunConfig, needs_boxes
from pipeline.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features import write_quarantine
from pipeline.region_files import ends_digest, opened, read_image, write_regions
from pipeline.sections import EMBEDDED
from pipeline.storage import Place
from pipeline.store import FeatureStore, feature_key, mark_complete, remove_orphans, write_index, write_shard


def keyed_by_id(dataset: Dataset) -> Dataset:
    """The data set with `id-<image id>` for content keys."""
    keys = pc.binary_join_element_wise("id", pc.cast(dataset.table["image_id"], pa.string()), "-")
    index = dataset.table.schema.get_field_index("key")
    return Dataset(dataset.table.set_column(index, "key", keys))


def feature_width(dataset: Dataset, config: RunConfig) -> int:
    """Width of the features, from the first image of the data set that the file has.

    Raises UserError when it has none of them, and where the model needs boxes and the image comes without.
    """
    with opened(region_file(config)) as file:
        for image_id in dataset.column("image_id"):
            found = file.get(f"{image_id}_features")
            if found is not None and found.ndim == 2:
                if needs_boxes(config.model):
                    _refuse_without_boxes(file, [image_id], config)
                return int(found.shape[1])
    first = dataset.column("image_id")[0]
    raise UserError(
        f"features.hdf5: {config.features.hdf5} has none of the {len(dataset)} images; expected <image id>_features, "
        f"for example {first}_features, of shape (regions, width)"
    )


def missing_regions(dataset: Dataset, config: RunConfig) -> dict[str, str]:
    """{key: reason} of images (keyed by id) that the file has no features of; UserError as `import_regions`."""
    with opened(region_file(config)) as file:
        _refuse(file, dataset.column("image_id"), dataset.column("image_id"), config)
        rows = zip(dataset.column("key"), dataset.column("image_id"), strict=True)
        return {key: f"the file has no {image}_features" for key, image in rows if f"{image}_features" not in file}


def import_regions(dataset: Dataset, config: RunConfig, say: Callable[[str], None]) -> tuple[Place, dict[str, str]]:
    """Features of the data set's images (keyed by id) from `features.hdf5`, those that the store lacks only.

    Returns the store's folder and {key: reason} of images without usable features. Raises UserError when the file is
    missing or no HDF5, its features have another width than the first, an image has more regions than the maximum, or
    the model needs boxes and an image comes without. Memory: one shard.
    """
    settings = config.features
    description = {"source": "hdf5", "file": ends_digest(region_file(config)), "regions": settings.max_regions}
    description |= {"stored": settings.stored_dtype, "cut": settings.cut_regions}
    folder = config.storage_place / "features" / feature_key(description)
    remove_orphans(folder)
    keys = dataset.table["key"]
    missing = dataset.table.filter(pa.array(~FeatureStore(folder).contains(keys))).select(["key", "image_id"])
    say(
        f"features {folder.name}: {len(dataset) - len(missing)} of {len(dataset)} images there, "
        f"{len(missing)} to import"
    )
    bad: dict[str, str] = {}
    width = feature_width(dataset, config)
    with opened(region_file(config)) as file:
        _refuse(file, dataset.column("image_id"), missing["image_id"].to_pylist(), config)
        for start in range(0, len(missing), settings.rows_per_shard):
            _import_shard(file, missing.slice(start, settings.rows_per_shard), width, folder, config, bad)
    if len(missing):
        write_index(folder)
    write_quarantine(folder, dataset, bad, {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, bad


def region_file(config: RunConfig) -> Path:
    """The HDF5 file that a configuration names; the embedded data set's is written when it is not there yet."""
    if config.features.hdf5 != EMBEDDED or config.data.synthetic is None:
        return Path(str(config.features.hdf5)).expanduser().absolute()
    from pipeline.scene_regions import file_name, scene_regions

    path = config.working_path / "data" / file_name(config.data.synthetic)
    if not path.is_file():
        write_regions(path, scene_regions(config.data.synthetic))
    return path


def _refuse(file: Any, image_ids: Sequence[int], new: Sequence[int], config: RunConfig) -> None:
    """UserError for boxes that the model needs and the file lacks, and, among new images, for too many regions."""
    if needs_boxes(config.model):
        _refuse_without_boxes(file, image_ids, config)
    if not config.features.cut_regions:
        _refuse_too_many(file, new, config)


def _refuse_without_boxes(file: Any, image_ids: Sequence[int], config: RunConfig) -> None:
    """An image without features is no matter here: it is quarantined."""
    for image_id in image_ids:
        if f"{image_id}_boxes" not in file and f"{image_id}_features" in file:
            raise UserError(
                f"features.hdf5: {config.features.hdf5} has no {image_id}_boxes, and {config.model.name} arranges "
                "regions by their boxes; give a file with boxes, or set model.encoder_clusters to none"
            )


def _refuse_too_many(file: Any, image_ids: Sequence[int], config: RunConfig) -> None:
    limit = config.features.max_regions
    for image_id in image_ids:
        found = file.get(f"{image_id}_features")
        if found is not None and found.ndim and found.shape[0] > limit:
            raise UserError(
                f"features.hdf5: image {image_id} has {found.shape[0]} regions, and features.max_regions is {limit}"
                f"; raise it, or set features.cut_regions to true to keep the first {limit} (sorted by confidence)"
            )


def _import_shard(file: Any, rows: pa.Table, width: int, folder: Place, config: RunConfig, bad: dict[str, str]) -> None:
    settings = config.features
    kept: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    for key, image_id in zip(rows["key"].to_pylist(), rows["image_id"].to_pylist(), strict=True):
        try:
            kept.append((key, *read_image(file, image_id, settings.max_regions, settings.stored_dtype)))
        except ValueError as error:
            bad[key] = str(error)
    if not kept:
        return
    for key, features, _ in kept:
        if features.shape[1] != width:
            raise UserError(
                f"features.hdf5: {settings.hdf5} holds features of different widths: {width} of the first image, "
                f"{features.shape[1]} of image {key.removeprefix('id-')}"
            )
    lengths = [len(features) for _, features, _ in kept]
    padded = np.zeros((len(kept), settings.max_regions, width), settings.stored_dtype)
    boxes = np.zeros((len(kept), settings.max_regions, 4), np.float32)
    for index, (_, features, corners) in enumerate(kept):
        padded[index, : len(features)] = features
        if corners is not None:
            boxes[index, : len(features)] = corners
    has_boxes = any(corners is not None for _, _, corners in kept)
    write_shard(folder, [key for key, _, _ in kept], padded, lengths, boxes if has_boxes else None)
