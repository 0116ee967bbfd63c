"""Imports a detector's region features (`features.hdf5`), which replace a backbone's, into the feature store.

The HDF5 layout is that of bottom-up attention and the Meshed-Memory Transformer: `<image_id>_features` (regions, C) and
`<image_id>_boxes` (regions, 4). In the store, each image is padded with zeros to `features.max_regions` regions. An
image's content key contains its id instead of a hash, because the image files need not exist.

The file must contain all values itself, because a reference to another file could read any file of the user. An image
whose data sets are damaged or too large is quarantined. Data sets may be compressed with gzip. The decompressed size of
each chunk is checked before libhdf5 reads it, because libhdf5 would decompress a chunk of any size.
"""

from __future__ import annotations

import hashlib
import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import SYNTHETIC
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.synthetic.scenes import regions_file_name, scene_regions
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.store import (
    FeatureStore,
    feature_key,
    mark_complete,
    remove_orphans,
    write_quarantine,
    write_shard,
)
from raycap.pipeline.runtime.names import one_line, printable
from raycap.pipeline.storage.atomic import atomic_path
from raycap.pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    import h5py

_DIGEST_BYTES = 16 * 2**20  # the digest covers this many bytes at the start and at the end of a file
_MAX_IMAGE_BYTES = 64 * 2**20  # limit of one data set; 100 regions of width 2,048 in float32 have 0.8 MB
MAX_SHARD_BYTES = 2**30  # limit, because a shard is built in memory; 256 images of 100 regions have 0.1 GB in float16
_MAX_WIDTH = 2**16  # values per region
_MAX_CHUNKS = 10_000  # limit of one data set, because libhdf5 takes 1.5 kB for each chunk that is read
logger = logging.getLogger(__name__)


def feature_width(dataset: Dataset, config: RunConfig) -> int:
    """The number C of values per region, from the data set's first image with usable features.

    Raises UserError if no image has usable features, boxes are missing, or regions are too many (`_check_images`).
    """
    reason = ""
    with open_regions(region_file(config)) as file:
        for image_id in dataset.column("image_id"):
            reasons = _check_images(file, [image_id], config)
            if not reasons:
                return int(_features_of(file, image_id).shape[1])
            reason = reason or reasons[image_id]
    first = dataset.column("image_id")[0]
    raise UserError(
        f"features.hdf5: {config.features.hdf5} has none of the {len(dataset)} images; expected <image id>_features, "
        f"for example {first}_features, of shape (regions, width); found: {reason}"
    )


def missing_regions(dataset: Dataset, config: RunConfig) -> dict[str, str]:
    """{content key: reason} of images without usable features. Raises UserError for missing boxes, too many regions."""
    image_ids = dataset.column("image_id")
    with open_regions(region_file(config)) as file:
        reasons = _check_images(file, image_ids, config)
    keys = dict(zip(image_ids, dataset.column("key"), strict=True))
    return {keys[image_id]: reason for image_id, reason in reasons.items()}


def import_regions(dataset: Dataset, config: RunConfig) -> tuple[StoragePath, dict[str, str]]:
    """Imports the features that the store lacks. dataset: with content keys that contain the ids (`keyed_by_id`).

    Returns the store's folder, and {content key: reason} of images without usable features. Raises UserError if the
    file is missing or not HDF5, widths differ, boxes are missing, or regions are too many. Needs memory for one shard.
    """
    settings = config.features
    # Everything that changes stored features. The store's name is a hash of this.
    description = {"source": "hdf5", "file": ends_digest(region_file(config)), "regions": settings.max_regions}
    description |= {"stored": settings.stored_dtype, "cut": settings.truncate_regions}
    folder = config.storage_place / "features" / feature_key(description)
    remove_orphans(folder)
    keys = dataset.table["key"]
    missing = dataset.table.filter(pa.array(~FeatureStore(folder).contains(keys))).select(["key", "image_id"])
    num_there = len(dataset) - len(missing)
    logger.info(f"features  {folder.name}: {num_there} of {len(dataset)} images there, {len(missing)} to import")
    width = feature_width(dataset, config)
    unusable: dict[str, str] = {}
    with open_regions(region_file(config)) as file:
        # Stored images are checked again, because they may be from a run whose model needed no boxes.
        checked = dataset.table if config.model.needs_boxes else missing
        _check_images(file, checked["image_id"].to_pylist(), config)
        row_bytes = settings.max_regions * width * np.dtype(settings.stored_dtype).itemsize
        rows_per_shard = max(1, min(settings.rows_per_shard, MAX_SHARD_BYTES // row_bytes))
        for start in range(0, len(missing), rows_per_shard):
            unusable |= _import_shard(file, missing.slice(start, rows_per_shard), width, folder, config)
    write_quarantine(folder, dataset, unusable, {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, unusable


def region_file(config: RunConfig) -> Path:
    """The HDF5 file of a configuration. A missing file of the synthetic data set is written first."""
    if config.features.hdf5 != SYNTHETIC or config.data.synthetic is None:
        return Path(str(config.features.hdf5)).expanduser().absolute()
    path = config.working_path / "data" / regions_file_name(config.data.synthetic)
    if not path.is_file():
        write_regions(path, scene_regions(config.data.synthetic))
    return path


def _check_images(file: h5py.File, image_ids: Sequence[int], config: RunConfig) -> dict[int, str]:
    """{image id: reason} of images without usable features.

    Raises UserError if an image with usable features lacks boxes that the model needs, or has more regions than
    `features.max_regions` although `features.truncate_regions` is false.
    """
    reasons, limit = {}, config.features.max_regions
    for image_id in image_ids:
        try:
            count = _features_of(file, image_id).shape[0]
        except ValueError as error:
            reasons[image_id] = str(error)
            continue
        if config.model.needs_boxes and _link(file, f"{image_id}_boxes") is None:
            raise UserError(
                f"features.hdf5: {config.features.hdf5} has no {image_id}_boxes, and {config.model.name} arranges "
                "regions by their boxes; give a file with boxes, or set model.encoder_clusters to none"
            )
        if count > limit and not config.features.truncate_regions:
            raise UserError(
                f"features.hdf5: image {image_id} has {count} regions, and features.max_regions is {limit}; raise it, "
                f"or set features.truncate_regions to true to keep the first {limit} (sorted by confidence)"
            )
    return reasons


def _import_shard(
    file: h5py.File, rows: pa.Table, width: int, folder: StoragePath, config: RunConfig
) -> dict[str, str]:
    """Writes the usable images of `rows` (columns key, image_id) as one shard of features of this width.

    Returns {content key: reason} of the unusable images.
    """
    settings = config.features
    images: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    unusable = {}
    for key, image_id in zip(rows["key"].to_pylist(), rows["image_id"].to_pylist(), strict=True):
        try:
            images[key] = read_image(file, image_id, settings.max_regions, settings.stored_dtype)
        except ValueError as error:
            unusable[key] = str(error)
    if not images:
        return unusable
    padded = np.zeros((len(images), settings.max_regions, width), settings.stored_dtype)
    for row, (key, (features, _)) in enumerate(images.items()):
        if features.shape[1] != width:
            raise UserError(
                f"features.hdf5: {settings.hdf5} holds features of different widths: {width} of the first image, "
                f"{features.shape[1]} of image {key.removeprefix('id-')}"
            )
        padded[row, : len(features)] = features
    lengths = [len(features) for features, _ in images.values()]
    write_shard(folder, list(images), padded, lengths, [boxes for _, boxes in images.values()])
    return unusable


def ends_digest(path: Path) -> str:
    """A digest of a file's size and of its first and last bytes, because the file may have hundreds of gigabytes."""
    _require_file(path)
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_DIGEST_BYTES))
        file.seek(max(0, size - _DIGEST_BYTES))
        digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()


def write_regions(path: Path, images: Iterator[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """Writes an HDF5 file atomically. images: (image id, features (R, C), boxes (R, 4)) of each image."""
    import h5py

    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        for image_id, features, boxes in images:
            file[f"{image_id}_features"], file[f"{image_id}_boxes"] = features, boxes


@contextmanager
def open_regions(path: Path) -> Iterator[h5py.File]:
    """Opens an HDF5 file for reading. Raises UserError if it is missing or not HDF5."""
    import h5py

    _require_file(path)
    try:
        file = h5py.File(path, "r")
    except Exception as error:  # damaged files raise OSError, RuntimeError, KeyError and others
        raise UserError(f"features.hdf5: {path} cannot be opened as HDF5: {one_line(error)}") from error
    with file:
        yield file


def read_image(file: h5py.File, image_id: int, max_regions: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Features (R, C), and boxes (R, 4) or None if there are none, of an image's first `max_regions` regions.

    The first regions are the most confident. Raises ValueError with the reason if the image has no usable features, or
    boxes of another shape.
    """
    stored = _features_of(file, image_id)
    features = _values(stored, f"{image_id}_features", max_regions, dtype)
    boxes = _find(file, f"{image_id}_boxes")
    if boxes is None:
        return features, None
    if boxes.shape != (stored.shape[0], 4) or boxes.dtype.kind not in "fiu":
        raise ValueError(
            f"{image_id}_boxes has shape {boxes.shape} and dtype {boxes.dtype}, not ({stored.shape[0]}, 4) numbers"
        )
    return features, _values(boxes, f"{image_id}_boxes", max_regions, "float32")


def _features_of(file: h5py.File, image_id: int) -> Any:
    """The HDF5 data set of an image's features (regions, width). Raises ValueError if it is missing or not usable."""
    name = f"{image_id}_features"
    stored = _find(file, name)
    if stored is None:
        raise ValueError(f"the file has no {name}")
    if len(stored.shape) != 2 or not all(stored.shape) or stored.dtype.kind != "f":
        raise ValueError(f"{name} has shape {stored.shape} and dtype {stored.dtype}, not (regions, width) floats")
    if stored.shape[1] > _MAX_WIDTH:
        raise ValueError(f"{name} has {stored.shape[1]} values per region, more than {_MAX_WIDTH}")
    return stored


def _find(file: h5py.File, name: str) -> Any:
    """The HDF5 data set of this name, or None if there is none. Raises ValueError if its values must not be read."""
    import h5py

    link = _link(file, name)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name} is a link to {printable(link.path)}; the file must contain the values itself")
    try:
        stored = file[name]
        problem = _problem_of(stored)
    except Exception as error:  # damaged files raise OSError, RuntimeError, KeyError, TypeError and others
        raise ValueError(f"{name} cannot be read: {one_line(error)}") from error
    if problem:
        raise ValueError(f"{name} {problem}")
    return stored


def _problem_of(stored: Any) -> str:
    """The reason why the values of an HDF5 object must not be read, or "". No value is read to decide it."""
    import h5py
    from h5py import h5z

    if not isinstance(stored, h5py.Dataset) or stored.shape is None:
        return "is no data set with values"
    if stored.is_virtual or stored.external:
        return "has its values in another file; the file must contain them itself"
    filters = _filters(stored)
    allowed = {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32}
    if set(filters) - allowed or len(set(filters)) < len(filters):
        return f"has the HDF5 filters {filters}; write it with gzip compression or without"
    chunks = stored.chunks or [max(1, side) for side in stored.shape]
    num_chunks = math.prod(math.ceil(side / chunk) for side, chunk in zip(stored.shape, chunks, strict=True))
    num_values = num_chunks * math.prod(chunks)
    num_bytes = num_values * stored.dtype.itemsize
    num_stored = stored.id.get_storage_size()
    if num_bytes > _MAX_IMAGE_BYTES or num_stored > 2 * num_bytes + 2**16:
        return f"has {max(num_bytes, num_stored)} bytes, more than an image's features need"
    if num_chunks > _MAX_CHUNKS:
        return f"has {num_chunks} chunks, more than {_MAX_CHUNKS}; write it with larger ones"
    least = num_values * stored.id.get_type().get_size()
    if h5z.FILTER_DEFLATE in filters:
        least = min(1, num_bytes)
    if num_stored < least:
        return f"has shape {stored.shape} and {'too few' if num_stored else 'no'} stored values"
    return ""


def _link(file: h5py.File, name: str) -> Any:
    """The link of this name, which is not followed, or None if there is none. Raises UserError for a damaged file."""
    try:
        return file.get(name, getlink=True)
    except Exception as error:
        raise UserError(f"features.hdf5: {file.filename} is damaged at {name}: {one_line(error)}") from error


def _values(stored: Any, name: str, max_regions: int, dtype: str) -> np.ndarray:
    """The first rows of an HDF5 data set. Raises ValueError if they cannot be read or are not finite in this dtype."""
    try:
        _require_true_size(stored, max_regions)
        with np.errstate(over="ignore"):
            values: np.ndarray = stored[:max_regions].astype(dtype)
    except Exception as error:  # a damaged chunk can raise nearly any type
        raise ValueError(f"{name} cannot be read: {one_line(error)}") from error
    if not np.isfinite(values).all():
        raise ValueError(f"{name} is not finite in {dtype}")
    return values


def _filters(stored: Any) -> list[int]:
    """The codes of a data set's filters, in the order in which they were applied."""
    properties = stored.id.get_create_plist()
    return [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]


def _require_true_size(stored: Any, max_regions: int) -> None:
    """Raises ValueError if a compressed chunk of the first rows decompresses to more than a chunk's size."""
    from h5py import h5z

    filters = _filters(stored)
    if h5z.FILTER_DEFLATE not in filters:
        return
    raw_bit = 1 << filters.index(h5z.FILTER_DEFLATE)  # the bit in `filter_mask` of a chunk that is not compressed
    max_bytes = math.prod(stored.chunks) * stored.dtype.itemsize + 4  # 4: the checksum of fletcher32
    chunks: list[Any] = []
    stored.id.chunk_iter(chunks.append)
    for chunk in chunks:
        if chunk.chunk_offset[0] < max_regions and not chunk.filter_mask & raw_bit:
            _, data = stored.id.read_direct_chunk(chunk.chunk_offset)
            if len(zlib.decompressobj().decompress(data, max_bytes + 1)) > max_bytes:
                raise ValueError(f"a chunk decompresses to more than its {max_bytes} bytes")


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"features.hdf5: file {path} does not exist; give the detector features' HDF5 file")
