"""Detector features: HDF5 files with `<image_id>_features` and `<image_id>_boxes` into the feature store.

The layout that the bottom-up and meshed-memory communities share: features (regions, C), boxes (regions, 4). The only
home of h5py. Rows are padded with zeros to `features.max_regions`; the store keeps each one's length and boxes. Images
are keyed by their id, because the photographs themselves need not be here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import RunConfig
from pipeline.dataset import Dataset
from pipeline.errors import UserError
from pipeline.features import write_quarantine
from pipeline.storage import Place
from pipeline.store import FeatureStore, feature_key, mark_complete, remove_orphans, write_index, write_shard

_ENDS = 16 * 2**20  # bytes hashed at each end of a file of many gigabytes


def keyed_by_id(dataset: Dataset) -> Dataset:
    """The data set with `id-<image id>` for content keys."""
    keys = pc.binary_join_element_wise("id", pc.cast(dataset.table["image_id"], pa.string()), "-")
    index = dataset.table.schema.get_field_index("key")
    return Dataset(dataset.table.set_column(index, "key", keys))


def import_regions(dataset: Dataset, config: RunConfig, say: Callable[[str], None]) -> tuple[Place, dict[str, str]]:
    """Features of the data set's images (keyed by id) from `features.hdf5`, those that the store lacks only.

    Returns the store's folder and {key: reason} of images without usable features. Raises UserError when the file is
    missing or no HDF5, or its features have another width than the first. Memory: one shard.
    """
    import h5py

    settings = config.features
    path = Path(str(settings.hdf5)).expanduser().absolute()
    description = {"source": "hdf5", "file": _digest(path), "regions": settings.max_regions}
    description["stored"] = settings.stored_dtype
    folder = config.storage_place / "features" / feature_key(description)
    remove_orphans(folder)
    keys = dataset.table["key"]
    missing = dataset.table.filter(pa.array(~FeatureStore(folder).contains(keys))).select(["key", "image_id"])
    say(
        f"features {folder.name}: {len(dataset) - len(missing)} of {len(dataset)} images there, "
        f"{len(missing)} to import"
    )
    bad: dict[str, str] = {}
    if len(missing):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise UserError(f"features.hdf5: {path} cannot be opened as HDF5: {error}") from error
        with file:
            for start in range(0, len(missing), settings.rows_per_shard):
                _import_shard(file, missing.slice(start, settings.rows_per_shard), folder, config, bad)
        write_index(folder)
    write_quarantine(folder, dataset, bad, {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, bad


def _import_shard(file: Any, rows: pa.Table, folder: Place, config: RunConfig, bad: dict[str, str]) -> None:
    settings = config.features
    kept: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    for key, image_id in zip(rows["key"].to_pylist(), rows["image_id"].to_pylist(), strict=True):
        try:
            kept.append((key, *_read_image(file, image_id, settings.max_regions, settings.stored_dtype)))
        except ValueError as error:
            bad[key] = str(error)
    if not kept:
        return
    widths = {features.shape[1] for _, features, _ in kept}
    if len(widths) > 1:
        raise UserError(f"features.hdf5: {settings.hdf5} holds features of different widths: {sorted(widths)}")
    lengths = [len(features) for _, features, _ in kept]
    padded = np.zeros((len(kept), settings.max_regions, widths.pop()), settings.stored_dtype)
    boxes = np.zeros((len(kept), settings.max_regions, 4), np.float32)
    for index, (_, features, corners) in enumerate(kept):
        padded[index, : len(features)] = features
        if corners is not None:
            boxes[index, : len(features)] = corners
    has_boxes = any(corners is not None for _, _, corners in kept)
    write_shard(folder, [key for key, _, _ in kept], padded, lengths, boxes if has_boxes else None)


def _read_image(file: Any, image_id: int, max_regions: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Features (R, C) and boxes (R, 4) of one image, at most `max_regions` (files are sorted by confidence)."""
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


def _digest(path: Path) -> str:
    """Size and the first and last bytes: enough to tell files apart, without reading a hundred gigabytes."""
    if not path.is_file():
        raise UserError(f"features.hdf5: file {path} does not exist; give the detector features' HDF5 file")
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        digest.update(file.read(_ENDS))
    return digest.hexdigest()
