"""Reads features from a store by content keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.features.store import FeatureStore


def contains(store: FeatureStore, content_key: str) -> bool:
    return bool(store.contains(pa.array([content_key]))[0])


def positions(store: FeatureStore, content_keys: Sequence[str]) -> np.ndarray:
    return store.locate(pa.array(content_keys, pa.string()))


def gather(store: FeatureStore, content_keys: Sequence[str]) -> np.ndarray:
    """Features (len(content_keys), N, C) in the order of the keys."""
    return store.gather_at(positions(store, content_keys))
