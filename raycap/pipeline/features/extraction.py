"""Extraction of features into the store, with Ray Data.

CPU tasks read, decode and resize the images. A pool of actors with the backbone computes features and writes shards.
Actors return only keys and reasons, so that features never enter Ray's object store.

For few images, there are no actors: the tasks that decode also run the backbone. Ray reuses the process of a task for
the next extraction, so that torch is imported only once. The process of an actor would end with the actor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.models.config import BackboneConfig, Values, content_key_of
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.cluster.stalls import one_sentence, repeat_interrupted_tasks
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import ACTOR_CPUS, DECODING_CPUS, FeatureSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import UNREADABLE, decode_batch
from raycap.pipeline.errors import UserError
from raycap.pipeline.features.precision import NOT_A_SIZE, extraction_precision
from raycap.pipeline.features.regions import import_regions
from raycap.pipeline.features.store import (
    QUARANTINE,
    QUARANTINE_FILE,
    FeatureStore,
    content_keys_of,
    feature_key,
    has_shard,
    mark_complete,
    remove_orphans,
    write_quarantine,
    write_shard,
)
from raycap.pipeline.runtime.log import progress
from raycap.pipeline.runtime.processor import computing_thread, device_for
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.tables import read_cache
from raycap.pipeline.storage.weights import weights_file_digest

logger = logging.getLogger(__name__)
CALLS_PER_ACTOR = 2  # batches per actor at a time, because an actor computes one while it writes another
MIN_BLOCKS = 8  # blocks into which even few images are divided, to be decoded in parallel
# A function that starts Ray and returns a context. The context's value is a function to call whenever more features are
# stored, so that the extraction does not count as stalled.
StartRay = Callable[[], AbstractContextManager[Callable[[], object]]]


class Extracted(NamedTuple):
    """A feature store, and {content key: reason} of images without usable features."""

    store: StoragePath
    missing: dict[str, str]

    def require_enough(self, num_images: int, config: RunConfig) -> None:
        """Raises UserError if more than `data.max_bad_fraction` of the images have no features."""
        if len(self.missing) > config.data.max_bad_fraction * num_images:
            reason = next(iter(self.missing.values()))
            raise UserError(
                f"{len(self.missing)} of {num_images} images give no features, more than data.max_bad_fraction = "
                f"{config.data.max_bad_fraction}; {self.store / 'quarantine.parquet'} lists them (first: {reason})"
            )


def extract_features(
    config: RunConfig,
    dataset: Dataset,
    weights: Path | None,
    start_ray: StartRay,
    unreadable: dict[str, str] | None = None,
    transform: ImageTransform | None = None,
) -> Extracted:
    """Adds the features of the data set's images that the store lacks.

    weights: the file of the backbone's weights, or None for region features. unreadable: {URI: reason} of images
    without a content key. start_ray: called only if images lack features. transform: the transform that a bundle
    records, or None for the backbone's.
    """
    if not config.has_backbone:
        return Extracted(*import_regions(dataset, config))
    assert weights is not None
    backbone = replace(config.backbone, weights="none")
    dtype = extraction_precision(backbone, config.features, config.storage_place / "precision", start_ray)
    settings = config.features.model_copy(update={"compute_dtype": dtype})
    extractor = Extractor(backbone, weights, settings, config.data.max_pixels, config.storage.options, transform)
    rows = with_views(dataset, config)
    return Extracted(*extract(rows, config.storage_place / "features", extractor, start_ray, unreadable))


def with_views(dataset: Dataset, config: RunConfig) -> Dataset:
    """The rows of an extraction. With `features.views`, a training image is replaced by its views.

    If a training split is also validated or tested on, its images stay beside the views. With views, the result has
    only the columns key and uri.
    """
    views = config.features.training_views
    if views is None:
        return dataset
    rows: dict[str, list[str | None]] = {"uri": [], "key": []}
    for uri, key, split in zip(*map(dataset.column, ("uri", "key", "split")), strict=True):
        is_trained = split in config.data.train_splits
        is_scored = split in (config.data.val_split, *config.data.test_splits)
        keys = [] if is_trained and not is_scored else [key]
        if is_trained and key is not None:
            keys += views.keys(key)
        rows["uri"] += [uri] * len(keys)
        rows["key"] += keys
    return Dataset(pa.table(rows, schema=pa.schema([("uri", pa.string()), ("key", pa.string())])))


def describe_features(config: RunConfig, num_tokens: int, num_parameters: int) -> str:
    """The source of the features in words. num_tokens: N of the features. num_parameters: of the backbone."""
    if not config.has_backbone:
        return f"regions of {config.features.hdf5}, at most {num_tokens}"
    backbone = config.backbone
    return f"{backbone.name} at {backbone.image_size} px, {num_parameters:,} parameters, {num_tokens} tokens"


@dataclass(frozen=True)
class Extractor:
    """Everything that determines features: the backbone, the file with its weights, and the numeric settings.

    `settings.compute_dtype` must not be `auto`, but a result of `extraction_precision`.
    """

    backbone: BackboneConfig
    weights: Path  # safetensors file of the backbone's state
    settings: FeatureSection
    max_pixels: int
    options: StorageOptions = StorageOptions()
    recorded: ImageTransform | None = None  # from a bundle, because another version of timm may have other statistics

    @property
    def transform(self) -> ImageTransform:
        """The transform of the images. Decoding tasks get the value, because reading this property imports torch."""
        if self.recorded is not None:
            return self.recorded
        from raycap.models.encoders.backbone import image_transform

        return image_transform(self.backbone)

    def describe(self) -> Values:
        """Everything that changes a feature, as JSON values. The store's name is a hash of this."""
        return {
            "backbone": self.backbone.feature_settings(*NOT_A_SIZE),
            "weights": weights_file_digest(self.weights),
            "transform": asdict(self.transform),
            "compute": self.settings.compute_dtype,
            "stored": self.settings.stored_dtype,
        }


class Plan(NamedTuple):
    """The images that an extraction has to compute, and those that it need not try again."""

    num_images: int  # distinct images in the data set
    missing: pa.Table  # the columns key and uri of the images to compute; every key occurs once
    unusable: dict[str, str]  # {content key: reason} of images that an earlier extraction could not use


def plan_extraction(dataset: Dataset, folder: StoragePath, max_pixels: int) -> Plan:
    """Finds the images of a data set that a store lacks. dataset: with content keys or keys of views."""
    quarantined: dict[str, str] = {}
    for row in read_cache(folder / QUARANTINE_FILE, QUARANTINE).to_pylist():
        reason = row["reason"]
        # An image that was too large for another limit may be within `max_pixels` now.
        may_fit = "pixels, more than" in reason and not reason.endswith(f" {max_pixels}")
        if row["key"] and not reason.startswith(UNREADABLE) and not may_fit:
            quarantined[row["key"]] = reason
    images = dataset.readable().table.select(["key", "uri"])
    images = images.take(pc.index_in(pc.unique(images["key"]), value_set=images["key"]))
    contents = content_keys_of(images)
    is_unusable = pc.is_in(contents, value_set=pa.array(quarantined, pa.string()))
    unusable = {key: quarantined[key] for key in contents.filter(is_unusable).to_pylist()}
    is_stored = pa.array(FeatureStore(folder).contains(images["key"]))
    return Plan(len(images), images.filter(pc.invert(pc.or_(is_unusable, is_stored))), unusable)


def extract(
    dataset: Dataset,
    features: StoragePath | Path,
    extractor: Extractor,
    start_ray: StartRay,
    unreadable: dict[str, str] | None = None,
) -> tuple[StoragePath, dict[str, str]]:
    """Computes the features that the store lacks. The data set's keys may be those of views.

    features: the folder of all stores. unreadable: {URI: reason} of images without a content key. Returns the store's
    folder, and {content key: reason} of images that cannot be used. `quarantine.parquet` lists both kinds of images.
    Identical images are computed once. `start_ray` is only called if the features of an image are missing.
    """
    description = extractor.describe()
    folder = storage_path(features) / feature_key(description)
    remove_orphans(folder)
    num_images, missing, unusable = plan_extraction(dataset, folder, extractor.max_pixels)
    num_missing = len(missing)
    unit = "images and views" if extractor.settings.views else "images"
    num_there = num_images - num_missing
    logger.info(f"features  {folder.name}: {num_there} of {num_images} {unit} there, {num_missing} to compute")
    if num_missing:
        watch = start_ray()
        begin, done = time.monotonic(), 0
        with watch as progressed, progress("features  ", num_missing) as advance:
            for batch in compute(missing, folder, extractor):
                rows = zip(batch["key"], batch["reason"], strict=True)
                unusable |= {content_key_of(str(key)): str(reason) for key, reason in rows if reason}
                done += len(batch["key"])
                advance(len(batch["key"]))
                progressed()
        seconds = time.monotonic() - begin
        logger.info(f"features    {done} {unit} in {seconds:.0f} s, {done / seconds:.0f} images/s")
        if done != num_missing:
            raise RuntimeError(f"Ray Data returned {done} of {num_missing} {unit}; run the extraction again")
    write_quarantine(folder, dataset, unusable, unreadable or {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, unusable


def compute(images: pa.Table, folder: StoragePath, extractor: Extractor) -> Iterator[dict[str, np.ndarray]]:
    """Computes the features of images with Ray Data and writes them to shards.

    images: a table with the columns key and uri (see `decode_batch`). Yields the rows of each finished shard with a
    column reason, which is "" for an image whose features are stored.
    """
    import ray
    import ray.data
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # no log, because its errors are raised anyway
    repeat_interrupted_tasks()
    DataContext.get_current().execution_no_progress_timeout_s = -1  # no limit, because the caller watches for stalls
    settings = extractor.settings
    arguments = {"folder": folder, "extractor": extractor}  # of `ShardWriter`
    if folder.is_remote:  # because workers on other machines cannot read this machine's file
        arguments["weights"] = ray.put(extractor.weights.read_bytes())
    uses_tasks = len(images) <= settings.max_images_for_tasks and not settings.gpus_per_actor
    block_rows = settings.rows_per_shard  # with tasks, a block is one task and one shard
    if not uses_tasks:  # blocks are small enough to be decoded in parallel
        block_rows = max(1, min(block_rows, math.ceil(len(images) / MIN_BLOCKS)))
    starts = range(0, len(images), block_rows)
    # `from_arrow` would be slower, because it runs a task for each block.
    source = ray.data.from_blocks([images.slice(start, block_rows).combine_chunks() for start in starts])
    with one_sentence("the extraction"):
        yield from _computed(source, extractor, arguments, uses_tasks).iter_batches(batch_size=None)


def _computed(source: Any, extractor: Extractor, arguments: Values, uses_tasks: bool) -> Any:
    """The Ray data set of the rows that `ShardWriter` returns.

    source: a Ray data set with the columns key and uri. arguments: those of `ShardWriter`.
    """
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    settings = extractor.settings
    decoding = {"transform": extractor.transform, "max_pixels": extractor.max_pixels, "options": extractor.options}
    decoding["augmentation"] = settings.augmentation
    if uses_tasks:
        return source.map_batches(
            _decode_and_compute,
            fn_kwargs={"decoding": decoding, **arguments},
            batch_size=None,
            compute=TaskPoolStrategy(size=settings.least_actors),
            num_cpus=1,
        )
    decoded = source.map_batches(decode_batch, fn_kwargs=decoding, batch_size=None, num_cpus=DECODING_CPUS)
    return decoded.map_batches(
        ShardWriter,
        fn_constructor_kwargs=arguments,
        batch_size=settings.rows_per_shard,
        # Two calls run in an actor at a time, so that it writes one shard while it computes the next.
        compute=ActorPoolStrategy(
            min_size=settings.least_actors,
            max_size=settings.most_actors,
            max_concurrent_calls_per_actor=CALLS_PER_ACTOR,
            enable_true_multi_threading=True,
        ),
        num_cpus=ACTOR_CPUS,
        num_gpus=settings.gpus_per_actor,
    )


def _decode_and_compute(batch: dict[str, np.ndarray], decoding: Values, **arguments: object) -> dict[str, np.ndarray]:
    """A Ray task that decodes a batch, computes its features and writes them as one shard.

    decoding: arguments of `decode_batch`. arguments: those of `ShardWriter`. Returns what `ShardWriter` returns.
    """
    return _writer(**arguments)(decode_batch(batch, **decoding))


@lru_cache(maxsize=1)
def _writer(**arguments: Any) -> ShardWriter:
    """The writer of this process, which is cached, so that the tasks of an extraction load the backbone once."""
    return ShardWriter(**arguments)


class ShardWriter:
    """Computes the features of a batch of images and writes them as one shard. Each process has one writer.

    Several threads may call a writer. One more thread computes for all of them, while they hash and write their shards.
    """

    def __init__(self, folder: StoragePath, extractor: Extractor, weights: Any = None) -> None:
        """weights: a reference to the bytes of `extractor.weights` in Ray's object store. If None, the file is read."""
        import ray

        from raycap.pipeline.features.model_inputs import FeatureComputer

        self.folder, self.settings, self.transform = folder, extractor.settings, extractor.transform
        self.thread = computing_thread(extractor.settings.threads)
        self.computer = self.thread.submit(
            FeatureComputer,
            extractor.backbone,
            extractor.weights,
            extractor.settings,
            device_for(extractor.settings.gpus_per_actor),
            None if weights is None else ray.get(weights),
        ).result()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Writes the shard of a batch of `decode_batch`. Returns the batch without the pixels.

        In the result, images whose features are not finite have a reason.
        """
        reasons = batch["reason"].astype(object)
        decoded = np.flatnonzero(reasons == "")
        keys = [str(key) for key in batch["key"][decoded]]
        if keys and not has_shard(self.folder, keys):  # an earlier attempt may have written the shard
            features, finite = self.thread.submit(self.features, batch["pixels"][decoded]).result()
            reasons[decoded[~finite]] = f"its features are not finite in {self.settings.stored_dtype}"
            if finite.any():
                keys = [key for key, is_finite in zip(keys, finite, strict=True) if is_finite]
                write_shard(self.folder, keys, features[finite])
        return {name: column for name, column in batch.items() if name != "pixels"} | {"reason": reasons.astype(str)}

    def features(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features (B, N, C) of pixels (B, H, W, 3) uint8, in the stored dtype, and (B,) True where all are finite."""
        import torch

        computed = self.computer.batches(
            torch.from_numpy(pixels),
            lambda features: (features.cpu().numpy(), features.isfinite().all(2).all(1).cpu().numpy()),
        )
        parts, finite = zip(*computed, strict=True)
        return np.concatenate(parts), np.concatenate(finite)
