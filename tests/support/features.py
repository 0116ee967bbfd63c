"""Reads features from a store by content keys, and writes a hostile HDF5 file."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import h5py
import numpy as np
import pyarrow as pa

from raycap.pipeline.features.store import FeatureStore


def contains(store: FeatureStore, content_key: str) -> bool:
    return bool(store.contains(pa.array([content_key]))[0])


def positions(store: FeatureStore, content_keys: Sequence[str]) -> np.ndarray:
    return store.locate(pa.array(content_keys, pa.string()))


def gather(store: FeatureStore, content_keys: Sequence[str]) -> np.ndarray:
    """Features (len(content_keys), N, C) in the order of the keys."""
    return store.gather_at(positions(store, content_keys))


def write_bomb(file: h5py.File, name: str, num_filters: int) -> None:
    """Writes a data set of (3, 8) values whose chunk decompresses to 64 MiB, or with several filters to 1 GiB."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((3, 8))
    for _ in range(num_filters):
        properties.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
    space = h5py.h5s.create_simple((3, 8))
    stored = h5py.h5d.create(file.id, name.encode(), h5py.h5t.NATIVE_FLOAT, space, properties)
    compressor, mebibyte = zlib.compressobj(9), bytes(2**20)
    first, other = (compressor.compress(mebibyte) + compressor.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    data = first + 1023 * other + compressor.flush()
    for _ in range(num_filters - 1):
        data = zlib.compress(data, 9)
    stored.write_direct_chunk((0, 0), data[: 2**16])  # more would be refused for its stored size
