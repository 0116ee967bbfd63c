"""Detector features into the feature store: a run reads them in place of a backbone's (`features.hdf5`).

Rows are padded with zeros to `features.max_regions`; the store keeps each one's length and boxes. Images are keyed by
their id, because the photographs themselves need not be here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.run import RunConfig, needs_boxes
from pipeline.config.sections import SYNTHETIC
from pipeline.data.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features.extraction import write_quarantine
from pipeline.features.store import FeatureStore, feature_key, mark_complete, remove_orphans, write_index, write_shard
from pipeline.storage.atomic import atomic_path
from pipeline.storage.path import StoragePath

logger = logging.getLogger(__name__)


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


def import_regions(dataset: Dataset, config: RunConfig) -> tuple[StoragePath, dict[str, str]]:
    """Features of the data set's images (keyed by id) from `features.hdf5`, those that the store lacks only.

    Returns the store's folder and {key: reason} of images without usable features. Raises UserError when the file is
    missing or no HDF5, its features have another width than the first, an image has more regions than the maximum, or
    the model needs boxes and an image comes without. Memory: one shard.
    """
    settings = config.features
    description = {"source": "hdf5", "file": ends_digest(region_file(config)), "regions": settings.max_regions}
    description |= {"stored": settings.stored_dtype, "cut": settings.truncate_regions}
    folder = config.storage_place / "features" / feature_key(description)
    remove_orphans(folder)
    keys = dataset.table["key"]
    missing = dataset.table.filter(pa.array(~FeatureStore(folder).contains(keys))).select(["key", "image_id"])
    logger.info(
        f"features  {folder.name}: {len(dataset) - len(missing)} of {len(dataset)} images there, "
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
    if config.features.hdf5 != SYNTHETIC or config.data.synthetic is None:
        return Path(str(config.features.hdf5)).expanduser().absolute()
    from pipeline.data.synthetic_regions import file_name, scene_regions

    path = config.working_path / "data" / file_name(config.data.synthetic)
    if not path.is_file():
        write_regions(path, scene_regions(config.data.synthetic))
    return path


def _refuse(file: Any, image_ids: Sequence[int], new: Sequence[int], config: RunConfig) -> None:
    """UserError for boxes that the model needs and the file lacks, and, among new images, for too many regions."""
    if needs_boxes(config.model):
        _refuse_without_boxes(file, image_ids, config)
    if not config.features.truncate_regions:
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
                f"; raise it, or set features.truncate_regions to true to keep the first {limit} (sorted by confidence)"
            )


def _import_shard(
    file: Any, rows: pa.Table, width: int, folder: StoragePath, config: RunConfig, bad: dict[str, str]
) -> None:
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


# Files of detector features, HDF5 (its only home): `<image_id>_features` and `<image_id>_boxes`.
# The layout that the bottom-up and meshed-memory communities share: features (regions, C), boxes (regions, 4).

_ENDS = 16 * 2**20  # bytes hashed at each end of a file of many gigabytes


def ends_digest(path: Path) -> str:
    """Size and the first and last bytes: enough to tell files apart, without reading a hundred gigabytes."""
    _require(path)
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()


def write_regions(path: Path, images: Iterator[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """(image id, features (R, C), boxes (R, 4)) as an HDF5 file of the shared layout, whole or not at all."""
    import h5py

    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        for image_id, features, boxes in images:
            file[f"{image_id}_features"], file[f"{image_id}_boxes"] = features, boxes


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The open HDF5 file. Raises UserError when it is missing or no HDF5."""
    import h5py

    _require(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise UserError(f"features.hdf5: {path} cannot be opened as HDF5: {error}") from error
    with file:
        yield file


def read_image(file: Any, image_id: int, max_regions: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Features (R, C) and boxes (R, 4) of one image, at most `max_regions` (files are sorted by confidence).

    Raises ValueError, its reason in words, for an image without usable features or with boxes that do not fit.
    """
    found = file.get(f"{image_id}_features")
    if found is None:
        raise ValueError(f"the file has no {image_id}_features")
    if found.ndim != 2 or not found.shape[0] or found.dtype.kind != "f":
        raise ValueError(f"{image_id}_features has shape {found.shape} and dtype {found.dtype}, not (regions, width)")
    with np.errstate(over="ignore"):
        features = found[:max_regions].astype(dtype)
    if not np.isfinite(features).all():
        raise ValueError(f"{image_id}_features is not finite in {dtype}")
    boxes = file.get(f"{image_id}_boxes")
    if boxes is None:
        return features, None
    if boxes.shape != (found.shape[0], 4):
        raise ValueError(f"{image_id}_boxes has shape {boxes.shape}, not ({found.shape[0]}, 4)")
    kept = boxes[:max_regions].astype(np.float32)
    if not np.isfinite(kept).all():
        raise ValueError(f"{image_id}_boxes is not finite")
    return features, kept


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"features.hdf5: file {path} does not exist; give the detector features' HDF5 file")
