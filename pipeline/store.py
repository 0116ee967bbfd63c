"""The feature store: fixed-stride shards of features, found by image content, read through memory maps.

    features/<feature_key>/shards/<name>.npy        (rows, N, C), one dtype
                           manifest/<name>.parquet  key, shard, row; written after its shard is whole
                           COMPLETE                 JSON: rows, tokens, width, dtype

A shard without its manifest does not exist for readers: a writer that died left it, and the next extraction removes
it. Two writers never share a name, so that they cannot damage each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MANIFEST = pa.schema([("key", pa.string()), ("shard", pa.string()), ("row", pa.int32()), ("sha256", pa.string())])


def feature_key(description: dict[str, Any]) -> str:
    """Name of a store: a hash of everything that changes features (backbone, weights, transform, dtypes)."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def write_shard(folder: Path, keys: Sequence[str], features: np.ndarray) -> None:
    """Adds `features` (rows, N, C) of the images `keys`: shard first, then the manifest that makes it exist."""
    name = uuid.uuid4().hex
    for part in ("shards", "manifest"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    shard = folder / "shards" / f"{name}.npy"
    temporary = shard.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, np.ascontiguousarray(features), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
    temporary.replace(shard)
    rows = {"key": list(keys), "shard": [name] * len(keys), "row": range(len(keys)), "sha256": [digest] * len(keys)}
    manifest = folder / "manifest" / f"{name}.parquet"
    temporary = manifest.with_suffix(".tmp")
    pq.write_table(pa.table(rows, schema=MANIFEST), temporary)
    temporary.replace(manifest)


class FeatureStore:
    """Read access to a store. `gather(keys)` -> (len(keys), N, C) in the stored dtype.

    Opening reads the manifest (40 bytes a row and the keys); shards are mapped when first touched.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[str] = []
        self._maps: dict[int, np.ndarray] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for part in sorted((folder / "manifest").glob("*.parquet")):
            table = pq.read_table(part, schema=MANIFEST).to_pydict()
            numbers: dict[str, int] = {}
            for key, shard, row in zip(table["key"], table["shard"], table["row"], strict=True):
                if shard not in numbers:
                    numbers[shard] = len(self._shards)
                    self._shards.append(shard)
                self._places.setdefault(key, (numbers[shard], row))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def gather(self, keys: Sequence[str]) -> np.ndarray:
        """Features of images in the order asked. Raises KeyError naming the first key that is not here."""
        places = []
        for key in keys:
            if key not in self._places:
                raise KeyError(f"features of image {key} are not in {self.folder}; run the extraction again")
            places.append(self._places[key])
        first = self._map(places[0][0])
        rows = np.empty((len(keys), *first.shape[1:]), first.dtype)
        for index, (shard, row) in enumerate(places):
            rows[index] = self._map(shard)[row]
        return rows

    def _map(self, number: int) -> np.ndarray:
        if number not in self._maps:
            path = self.folder / "shards" / f"{self._shards[number]}.npy"
            self._maps[number] = np.load(path, mmap_mode="r", allow_pickle=False)
        return self._maps[number]


def remove_orphans(folder: Path, min_age_s: float = 3600) -> int:
    """Removes what writers that died left behind. Returns how many files.

    A file younger than `min_age_s` may be another extraction's shard on its way to its manifest, and stays.
    """
    named = {path.stem for path in (folder / "manifest").glob("*.parquet")}
    orphans = [path for path in (folder / "shards").glob("*") if path.suffix == ".tmp" or path.stem not in named]
    orphans += (folder / "manifest").glob("*.tmp")
    old = [path for path in orphans if path.stat().st_mtime < time.time() - min_age_s]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def mark_complete(folder: Path, description: dict[str, Any], rows: int) -> None:
    """The marker that says what the store holds and how it was made."""
    marker = folder / "COMPLETE"
    text = json.dumps({"rows": rows, **description}, indent=1, sort_keys=True)
    if not marker.is_file() or marker.read_text() != text:
        temporary = folder / ".COMPLETE.tmp"
        temporary.write_text(text)
        temporary.replace(marker)
