"""Extraction of features into the store, with Ray Data.

CPU tasks read, decode and resize the images of a table of content keys and URIs. A pool of actors with the backbone
computes features and writes shards. Actors return only keys and reasons, so features never enter Ray's object store.

For few images the same tasks also run the backbone. This is faster when extractions follow each other, because Ray
reuses a task's process with its imported modules, whereas an actor's process ends with the actor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import BackboneConfig
from models.transform import ImageTransform
from models.views import content_key_of
from pipeline.config.sections import ACTOR_CPUS, DECODING_CPUS, FeatureSection
from pipeline.data.content_keys import HashedFiles, HashFiles
from pipeline.data.dataset import Dataset
from pipeline.data.images import UNREADABLE, decode_batch
from pipeline.features.interruptions import one_sentence, repeat_interrupted_tasks
from pipeline.features.store import (
    KEY_BEGIN,
    FeatureStore,
    feature_key,
    has_shard,
    mark_complete,
    remove_damaged,
    remove_orphans,
    write_index,
    write_shard,
)
from pipeline.runtime.progress import progress
from pipeline.storage.path import StorageOptions, StoragePath, storage_path
from pipeline.storage.tables import read_cache, write_table
from pipeline.storage.weights import weights_file_digest

logger = logging.getLogger(__name__)

# One malloc arena per actor limits memory. It must be set before an actor starts, because Ray's threads create arenas.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
CALLS_PER_ACTOR = 2  # batches that an actor has at a time: one is computed, one is written
MIN_BLOCKS = 8  # few images are divided into this many blocks of rows, which are decoded in parallel
QUARANTINE_FILE = "quarantine.parquet"
QUARANTINE = pa.schema([("uri", pa.string()), ("key", pa.string()), ("reason", pa.string())])

# Starts Ray. The value of the context is called whenever features of more images are stored.
StartRay = Callable[[], AbstractContextManager[Callable[[], object]]]


@dataclass(frozen=True)
class Extractor:
    """The settings that determine features: the backbone, the file with its weights, and the numeric settings.

    `settings.compute_dtype` must be a concrete dtype when features are described or computed (`extraction_precision`).
    """

    backbone: BackboneConfig
    weights: Path  # safetensors file of the backbone's state
    settings: FeatureSection
    max_pixels: int
    options: StorageOptions = StorageOptions()

    @property
    def transform(self) -> ImageTransform:
        """The transform that belongs to the backbone. It imports torch; tasks that decode images are sent the value."""
        from models.backbone import image_transform

        return image_transform(self.backbone)

    def describe(self) -> dict[str, Any]:
        """Everything that changes a feature."""
        ignored = ("weights", "drop_path", "gradient_checkpointing", "transform")
        return {
            "backbone": self.backbone.feature_settings(*ignored),
            "weights": weights_file_digest(self.weights),
            "transform": self.transform.describe(),
            "compute": self.settings.compute_dtype,
            "stored": self.settings.stored_dtype,
        }


class Plan(NamedTuple):
    """The images of an extraction."""

    num_images: int  # distinct images in the data set
    missing: pa.Table  # columns key and uri of the images or views to compute; every key occurs once
    unusable: dict[str, str]  # {content key: reason} of images that an earlier extraction could not use


def plan_extraction(dataset: Dataset, folder: StoragePath, max_pixels: int) -> Plan:
    """The images of a data set (with content keys) that a store lacks. Takes about 1 s per million images."""
    table = dataset.readable().table.select(["key", "uri"])
    keys = pc.unique(table["key"])
    unique = table.take(pc.index_in(keys, value_set=table["key"])) if len(keys) < len(table) else table
    quarantined = {
        row["key"]: row["reason"]
        for row in read_cache(folder / QUARANTINE_FILE, QUARANTINE).to_pylist()
        if row["key"]
        and not row["reason"].startswith(UNREADABLE)
        # An image that was too large for another limit may be within `max_pixels`, so only this limit counts.
        and ("pixels, more than" not in row["reason"] or row["reason"].endswith(f" {max_pixels}"))
    }
    is_stored = pa.chunked_array([pa.array(FeatureStore(folder).contains(unique["key"]))])
    contents = _content_keys(unique)
    is_unusable = pc.is_in(contents, value_set=pa.array(list(quarantined), pa.string()))
    missing = unique.filter(pc.invert(pc.or_(is_stored, is_unusable)))
    return Plan(len(unique), missing, {key: quarantined[key] for key in contents.filter(is_unusable).to_pylist()})


def _content_keys(table: pa.Table) -> pa.ChunkedArray:
    """The content keys in the column key, which may also contain keys of views: a SHA-256 as 64 digits and more."""
    return pc.utf8_slice_codeunits(table["key"], 0, 64)


def extract(
    dataset: Dataset,
    features: StoragePath | Path,
    extractor: Extractor,
    start_ray: StartRay,
    unreadable: dict[str, str] | None = None,
) -> tuple[StoragePath, dict[str, str]]:
    """Computes the features that the store lacks, for every image of the data set, whose keys may be those of views.

    Identical images are computed once, and those in damaged shards again. Returns the store's folder and {content key:
    reason} of images that cannot be decoded. `quarantine.parquet` lists these images and those in `unreadable` ({URI:
    reason}). `start_ray` is called only when an image is missing. Its context is entered while Ray computes. The driver
    needs memory for the keys and URIs of the data set.
    """
    description = extractor.describe()
    folder = storage_path(features) / feature_key(description)
    remove_orphans(folder)
    remove_damaged(folder, dataset.table["key"])
    total, missing, unusable = plan_extraction(dataset, folder, extractor.max_pixels)
    count = len(missing)
    unit = "images and views" if extractor.settings.views else "images"
    logger.info(f"features  {folder.name}: {total - count} of {total} {unit} there, {count} to compute")
    if count:
        watch = start_ray()
        begin, done = time.monotonic(), 0
        with watch as progressed, progress("features  ", count) as advance:
            for batch in compute(missing, folder, extractor):
                rows = zip(batch["key"], batch["reason"], strict=True)
                unusable |= {content_key_of(str(key)): str(reason) for key, reason in rows if reason}
                done += len(batch["key"])
                advance(len(batch["key"]))
                progressed()
        seconds = time.monotonic() - begin
        logger.info(f"features    {done} {unit} in {seconds:.0f} s, {done / seconds:.0f} images/s")
        if done != count:
            raise RuntimeError(f"Ray Data returned {done} of {count} {unit}; run the extraction again")
        write_index(folder)
    write_quarantine(folder, dataset, unusable, unreadable or {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, unusable


def hashing_extraction(features: StoragePath | Path, extractor: Extractor, start_ray: StartRay) -> HashFiles:
    """What reads new files for `take_snapshot`: an extraction, which also stores the features of their images.

    Each file is read once, on the cluster. Images that cannot be decoded have a content key and no features; the
    extraction that follows finds them again and lists them in the quarantine. features, start_ray: see `extract`.
    """

    def hash_files(uris: pa.Array, options: StorageOptions) -> Iterator[HashedFiles]:
        folder = storage_path(features) / feature_key(extractor.describe())
        known = FeatureStore(folder).key_begins()  # also of an attempt that ended before its keys were written
        logger.info(f"features  {folder.name}: {len(uris)} new images are read, hashed and computed")
        numbers = pa.array(np.arange(len(uris)))
        rows = pa.table([pa.nulls(len(uris), pa.string()), uris, numbers], names=["key", "uri", "number"])
        with start_ray() as progressed:
            for batch in compute(rows, folder, extractor, known):
                keys = pa.array(batch["key"], pa.string())
                keys = pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)
                failed = np.flatnonzero(batch["key"] == "")
                reasons = zip(batch["uri"][failed], batch["reason"][failed], strict=True)
                texts = {str(uri): str(reason).removeprefix(f"{UNREADABLE}: ") for uri, reason in reasons}
                yield HashedFiles(batch["number"], keys, texts)
                progressed()
        write_index(folder)

    return hash_files


def compute(
    missing: pa.Table, folder: StoragePath, extractor: Extractor, known: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Computes the features of the images in `missing` (columns key, uri) with Ray Data, and writes them to shards.

    missing: see `decode_batch`; its further columns are kept. known: of `FeatureStore.key_begins`, which every node
    shares: images that are not computed, for rows whose keys are not known yet. Yields its rows with the column reason
    as shards are finished. The reason is "" for an image whose features are stored.
    """
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised, too
    repeat_interrupted_tasks()
    DataContext.get_current().execution_no_progress_timeout_s = -1  # the caller's watch ends a stall
    settings, count = extractor.settings, len(missing)
    decoding = {"transform": extractor.transform, "max_pixels": extractor.max_pixels, "options": extractor.options}
    decoding["augmentation"] = settings.augmentation
    arguments = {"folder": folder, "extractor": extractor}
    if known is not None and len(known):
        arguments["known"] = ray.put(known)
    if folder.is_remote:  # workers on other machines cannot read the driver's file
        arguments["weights"] = ray.put(extractor.weights.read_bytes())
    uses_tasks = count <= settings.max_images_for_tasks and not settings.gpus_per_actor
    # With actors, blocks are small enough to decode in parallel. With tasks, a block is one task and one shard.
    block_rows = settings.rows_per_shard
    if not uses_tasks:
        block_rows = max(1, min(block_rows, math.ceil(count / MIN_BLOCKS)))
    starts = range(0, count, block_rows)
    # `from_arrow` runs a task for each block
    source = ray.data.from_blocks([missing.slice(start, block_rows).combine_chunks() for start in starts])
    if uses_tasks:
        computed = source.map_batches(
            _decode_and_compute,
            fn_kwargs={"decoding": decoding, **arguments},
            batch_size=None,
            compute=TaskPoolStrategy(size=settings.least_actors),
            num_cpus=1,
        )
    else:
        decoded = source.map_batches(decode_batch, fn_kwargs=decoding, batch_size=None, num_cpus=DECODING_CPUS)
        computed = decoded.map_batches(
            ShardWriter,
            fn_constructor_kwargs=arguments,
            batch_size=settings.rows_per_shard,
            # An actor writes one shard while its computing thread has the next one.
            compute=ActorPoolStrategy(
                min_size=settings.least_actors,
                max_size=settings.most_actors,
                max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
                enable_true_multi_threading=True,
            ),
            num_cpus=ACTOR_CPUS,
            num_gpus=settings.gpus_per_actor,
            runtime_env={"env_vars": ONE_ARENA},
        )
    with one_sentence("the extraction"):
        yield from computed.iter_batches(batch_size=None)


def _decode_and_compute(
    batch: dict[str, np.ndarray], decoding: dict[str, Any], **arguments: Any
) -> dict[str, np.ndarray]:
    """A Ray task that decodes a batch, computes its features and writes them as one shard.

    decoding: arguments of `decode_batch`. arguments: those of `ShardWriter`. Returns what `ShardWriter` returns.
    """
    return _writer(**arguments)(decode_batch(batch, **decoding))


@lru_cache(maxsize=1)
def _writer(**arguments: Any) -> ShardWriter:
    """The process's writer, which all tasks of an extraction share."""
    return ShardWriter(**arguments)


class ShardWriter:
    """Computes the features of a batch of images and writes them as one shard. Each process has one writer.

    Several threads may call it. One thread computes for all of them, so that a shard is hashed and written while the
    next one is computed.
    """

    def __init__(self, folder: StoragePath, extractor: Extractor, weights: Any = None, known: Any = None) -> None:
        """weights: a reference to the bytes of `extractor.weights` in Ray's object store; None for a local file.

        known: a reference to the begins of the keys of images whose features are not computed; None for none.
        """
        import ray

        from pipeline.features.computation import FeatureComputer
        from pipeline.runtime.context import device_for
        from pipeline.runtime.cpu import computing_thread

        self.folder, self.settings, self.transform = folder, extractor.settings, extractor.transform
        self.thread = computing_thread(extractor.settings.threads_per_actor)
        self.computer = self.thread.submit(
            FeatureComputer,
            extractor.backbone,
            extractor.weights,
            extractor.settings,
            device_for(extractor.settings.gpus_per_actor),
            None if weights is None else ray.get(weights),
        ).result()
        self.known = None if known is None else ray.get(known)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes the columns of `decode_batch`, whose reason is "" for a decoded image.

        Returns them without the pixels. Images whose features are not finite also have a reason now.
        """
        reasons = batch["reason"].astype(object)
        is_wanted = reasons == ""
        if self.known is not None:
            begins = batch["key"].astype(KEY_BEGIN)
            places = np.minimum(np.searchsorted(self.known, begins), len(self.known) - 1)
            is_wanted &= self.known[places] != begins
        decoded = np.flatnonzero(is_wanted)
        keys = [str(key) for key in batch["key"][decoded]]
        if keys and not has_shard(self.folder, keys):  # a repeated task may have written the shard before it died
            features, finite = self.thread.submit(self.features, batch["pixels"][decoded]).result()
            reasons[decoded[~finite]] = f"its features are not finite in {self.settings.stored_dtype}"
            if finite.any():
                keys = [key for key, is_finite in zip(keys, finite, strict=True) if is_finite]
                write_shard(self.folder, keys, features[finite])
        return {name: column for name, column in batch.items() if name != "pixels"} | {"reason": reasons.astype(str)}

    def features(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features (B, N, C) in the stored dtype of pixels (B, H, W, 3) uint8, and for each image whether it is finite.

        Both are computed on the device (`FeatureComputer.batches`).
        """
        import torch

        computed = self.computer.batches(
            torch.from_numpy(pixels),
            lambda features: (features.cpu().numpy(), features.isfinite().all(2).all(1).cpu().numpy()),
        )
        parts, finite = zip(*computed, strict=True)
        return np.concatenate(parts), np.concatenate(finite)


def write_quarantine(
    folder: StoragePath, dataset: Dataset, unusable: dict[str, str], unreadable: dict[str, str]
) -> None:
    """Replaces the quarantine's rows of this data set by `unusable` ({content key: reason}) and `unreadable`.

    unreadable: {URI: reason}. The rows of other data sets remain.
    """
    before = read_cache(folder / QUARANTINE_FILE, QUARANTINE)
    of_others = before.filter(pc.invert(pc.is_in(before["uri"], value_set=dataset.table["uri"])))
    rows = {row["uri"]: row for row in of_others.to_pylist()}
    content_keys = _content_keys(dataset.table)
    is_unusable = pc.is_in(content_keys, value_set=pa.array(list(unusable), pa.string()))
    uris = dataset.table["uri"].filter(is_unusable).to_pylist()
    for uri, key in zip(uris, content_keys.filter(is_unusable).to_pylist(), strict=True):
        rows[uri] = {"uri": uri, "key": key, "reason": unusable[key]}
    for uri, reason in unreadable.items():
        rows[uri] = {"uri": uri, "key": None, "reason": f"{UNREADABLE}: {reason}"}
    after = sorted(rows.values(), key=lambda row: row["uri"])
    if after != before.to_pylist():
        write_table(folder / QUARANTINE_FILE, pa.Table.from_pylist(after, QUARANTINE))
