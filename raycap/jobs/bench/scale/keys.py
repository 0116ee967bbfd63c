"""The part "keys": listing, content keys, plan and store of images on S3, without a storage.

The code is that of a run. Only the listing of the bucket and the content of the images are made up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.jobs.bench.measuring import in_new_process
from raycap.jobs.bench.scale.measured import Measurement, measured
from raycap.pipeline.data.content_keys import HashedFiles, take_snapshot
from raycap.pipeline.data.dataset import CHUNK_ROWS, SCHEMA, Dataset
from raycap.pipeline.features.extraction import plan_extraction
from raycap.pipeline.features.store.index import MANIFEST, SHARDS_PER_PART, read_manifests
from raycap.pipeline.features.store.shards import INDEX
from raycap.pipeline.features.store.store import FeatureStore
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import Entry, StorageOptions
from raycap.pipeline.storage.tables import spilled, write_table

PER_LISTING = 1000  # objects that S3 lists per request
PER_FOLDER = 100_000
ROWS_PER_SHARD = 256
ROWS_PER_TASK = 10_000  # whose keys arrive at a time
BUCKET = "s3://bucket/images"


def measure_keys(rows: int, folder: Path) -> Iterator[Measurement]:
    """Content keys of new and of unchanged images, the plan of their extraction, and a store opened by a worker."""
    yield measured("keys: new images", rows, _take_snapshot, rows, folder)
    yield measured("keys: nothing new", rows, _take_snapshot, rows, folder)
    in_new_process(_write_store, rows, folder)
    yield measured("keys: plan", rows, _plan, rows, folder)
    yield measured("keys: worker's store", rows, _open, folder)


def _names(rows: int) -> Iterator[tuple[str, pa.Array]]:
    """The folders of the bucket, and the names of their images."""
    for start in range(0, rows, PER_FOLDER):
        numbers = pa.array(np.arange(start, min(start + PER_FOLDER, rows)))
        yield f"{start // PER_FOLDER:06}", pc.binary_join_element_wise(pc.cast(numbers, pa.string()), "jpg", ".")


def _uris(rows: int) -> Iterator[pa.Array]:
    for part, names in _names(rows):
        yield pc.binary_join_element_wise(f"{BUCKET}/{part}", names, "/")


def _dataset(rows: int, keys: pa.ChunkedArray | None = None) -> Dataset:
    """The images without captions, which no step here reads, memory-mapped as a run has them."""

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for uris in _uris(rows):
            count = len(uris)
            captions = pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], pa.string()))
            splits = pa.array(["train"]).take(pa.array(np.zeros(count, np.int64)))
            part = pa.nulls(count, pa.string()) if keys is None else keys.slice(start, count).combine_chunks()
            columns = [pa.array(np.arange(start, start + count)), splits, uris, captions, part]
            yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
            start += count

    return Dataset(spilled(SCHEMA, batches()))


def _keys(uris: list[str]) -> pa.Array:
    return pa.array([hashlib.sha256(uri.encode()).hexdigest() for uri in uris], pa.string())


def _take_snapshot(rows: int, folder: Path) -> int:
    """Takes a snapshot of made-up objects. Returns the number of requests that list them."""
    requests, walk_local = 0, StoragePath.walk

    def walk(path: StoragePath) -> Iterator[tuple[str, Entry]]:
        nonlocal requests
        if not path.is_remote:
            yield from walk_local(path)
            return
        names = next(names for part, names in _names(rows) if path.uri.endswith(part))
        for number, name in enumerate(names.to_pylist()):
            requests += number % PER_LISTING == 0
            yield name, Entry(180_000, "etag")

    def hash_files(uris: pa.ChunkedArray, _: StorageOptions) -> Iterator[HashedFiles]:
        for start in range(0, len(uris), ROWS_PER_TASK):
            part = uris.slice(start, ROWS_PER_TASK).to_pylist()
            yield HashedFiles(np.arange(start, start + len(part)), _keys(part), {})

    with patch.object(StoragePath, "walk", walk):
        take_snapshot(_dataset(rows), folder / "manifest.parquet", hash_files=hash_files)
    return requests


def _write_store(rows: int, folder: Path) -> None:
    """Writes the index of a store with all images, and empty files as manifests of its shards."""
    root = folder / "store"
    (root / "manifest").mkdir(parents=True)
    shards = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(-(-rows // ROWS_PER_SHARD))]
    for shard in shards:
        (root / "manifest" / f"{shard}.parquet").touch()
    uris, per_part = pa.chunked_array(list(_uris(rows))), SHARDS_PER_PART * ROWS_PER_SHARD
    for start in range(0, rows, per_part):
        part = uris.slice(start, per_part)
        numbers = np.arange(start, start + len(part))
        names = pa.array(shards).take(pa.array(numbers // ROWS_PER_SHARD))
        columns = [_keys(part.to_pylist()), names, pa.array((numbers % ROWS_PER_SHARD).astype(np.int32)), names]
        columns += [pa.array(np.full(len(part), 1 << 20))]
        columns += [pa.nulls(len(part), pa.int32()), pa.nulls(len(part), pa.string())]
        write_table(storage_path(root) / f"{INDEX}/{start}.parquet", pa.table(columns, schema=MANIFEST))


def _stored_keys(folder: Path) -> pa.ChunkedArray:
    """The keys of a store, memory-mapped as those of a data set are."""
    tables = read_manifests(storage_path(folder / "store"))
    batches = (batch for table in tables for batch in table.select(["key"]).to_batches(max_chunksize=CHUNK_ROWS))
    return spilled(pa.schema([("key", pa.string())]), batches)["key"]


def _plan(rows: int, folder: Path) -> None:
    plan = plan_extraction(_dataset(rows, _stored_keys(folder)), storage_path(folder / "store"), max_pixels=10**8)
    assert not len(plan.missing)


def _open(folder: Path) -> None:
    """What a worker does with a store: it opens it and finds its images."""
    FeatureStore(folder / "store").locate(_stored_keys(folder))
