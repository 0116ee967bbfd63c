"""Files of detector features, HDF5 (its only home): `<image_id>_features` and `<image_id>_boxes`.

The layout that the bottom-up and meshed-memory communities share: features (regions, C), boxes (regions, 4).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError

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

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with h5py.File(temporary, "w") as file:
        for image_id, features, boxes in images:
            file[f"{image_id}_features"], file[f"{image_id}_boxes"] = features, boxes
    temporary.replace(path)


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
