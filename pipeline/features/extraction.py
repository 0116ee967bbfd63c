"""Extraction: images to features in the store, with Ray Data (its only home).

A manifest of (key, URI) -> bytes, decoded and resized in CPU tasks -> an actor pool with the backbone, which writes
shards itself; only keys and reasons travel back, so that features never enter the object store.

A job of few images does all of that in one task after the other instead: Ray keeps a task's process, so that what it
has imported is there for the next extraction, while an actor's ends with it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import BackboneConfig
from models.transform import ImageTransform
from pipeline.config.sections import FeatureSection
from pipeline.data.dataset import Dataset
from pipeline.data.images import UNREADABLE, decode_batch
from pipeline.features.store import (
    FeatureStore,
    feature_key,
    has_shard,
    mark_complete,
    remove_orphans,
    write_index,
    write_shard,
)
from pipeline.runtime.progress import progress
from pipeline.storage.path import StorageOptions, StoragePath, place
from pipeline.storage.tables import read_table, write_table

logger = logging.getLogger(__name__)


ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # from an actor's start: Ray's own threads make others before ours is there
QUARANTINE = pa.schema([("uri", pa.string()), ("key", pa.string()), ("reason", pa.string())])


@dataclass(frozen=True)
class Extractor:
    """What makes features: a backbone, the file with its weights, and the numeric settings."""

    backbone: BackboneConfig
    weights: Path  # safetensors with the backbone's state
    settings: FeatureSection
    max_pixels: int
    options: StorageOptions = StorageOptions()

    def describe(self) -> dict[str, Any]:
        """Everything that changes a feature; `compute: auto` is resolved here so that machines never mix precisions."""
        from pipeline.runtime.weights import weights_file_digest

        architecture = {
            k: v
            for k, v in asdict(self.backbone).items()
            if k not in ("weights", "drop_path", "gradient_checkpointing")
        }
        return {
            "backbone": architecture,
            "weights": weights_file_digest(self.weights),
            "transform": ImageTransform(self.backbone.image_size).describe(),
            "compute": resolve_dtype(self.settings.compute_dtype),
            "stored": self.settings.stored_dtype,
        }


class Plan(NamedTuple):
    """What an extraction has to do; `missing` has columns key and uri, each key once."""

    wanted: int  # different images in the data set
    missing: pa.Table
    bad: dict[str, str]  # {key: reason} of images that are known to give no features


def resolve_dtype(name: str) -> str:
    """`auto` is bfloat16 where the processor has it in hardware (CUDA from Ampere on, AVX512-BF16), else float32."""
    if name != "auto":
        return name
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():  # without torch, whose import takes seconds
        return "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def plan_extraction(dataset: Dataset, folder: StoragePath, max_pixels: int) -> Plan:
    """Which images of a data set (with content keys) a store lacks. Reads manifests only; a second a million images."""
    table = dataset.known().table.select(["key", "uri"])
    keys = pc.unique(table["key"])
    unique = table.take(pc.index_in(keys, value_set=table["key"])) if len(keys) < len(table) else table
    bad = {
        row["key"]: row["reason"]
        for row in _read_quarantine(folder)
        if row["key"]
        and not row["reason"].startswith(UNREADABLE)
        # too large under another limit may be fine under this one
        and ("pixels, more than" not in row["reason"] or row["reason"].endswith(f" {max_pixels}"))
    }
    there = pa.array(FeatureStore(folder).contains(unique["key"]))
    known_bad = pc.is_in(unique["key"], value_set=pa.array(list(bad), pa.string()))
    missing = unique.filter(pc.invert(pc.or_(pa.chunked_array([there]), known_bad)))
    mine = set(unique["key"].filter(known_bad).to_pylist())
    return Plan(len(unique), missing, {key: reason for key, reason in bad.items() if key in mine})


def extract(
    dataset: Dataset,
    features: StoragePath | Path,
    extractor: Extractor,
    start_ray: Callable[[], None],
    unreadable: dict[str, str] | None = None,
) -> tuple[StoragePath, dict[str, str]]:
    """Features of every image of the data set, computed only where the store lacks them.

    Identical images are computed once. Returns the store's folder and {content key: reason} of images that cannot be
    decoded; both they and `unreadable` ({URI: reason}, from the snapshot) are listed in `quarantine.parquet`. Ray is
    started (`start_ray`) only when there is something to compute. Cost: keys and URIs of the data set in the driver.
    """
    description = extractor.describe()
    folder = place(features) / feature_key(description)
    remove_orphans(folder)
    wanted, missing, bad = plan_extraction(dataset, folder, extractor.max_pixels)
    count = len(missing)
    logger.info(f"features  {folder.name}: {wanted - count} of {wanted} images there, {count} to compute")
    if count:
        start_ray()
        begin, done = time.monotonic(), 0
        with progress("features  ", count) as advance:
            for keys, reasons in compute(missing, folder, extractor):
                bad |= {str(key): str(reason) for key, reason in zip(keys, reasons, strict=True) if reason}
                done += len(keys)
                advance(len(keys))
        seconds = time.monotonic() - begin
        logger.info(f"features    {done} images in {seconds:.0f} s, {done / seconds:.0f} images/s")
        if done != count:
            raise RuntimeError(f"Ray Data gave back {done} of {count} images; run the extraction again")
        write_index(folder)
    write_quarantine(folder, dataset, bad, unreadable or {})
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, bad


def compute(missing: pa.Table, folder: StoragePath, extractor: Extractor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs Ray Data over `missing` (key, uri); gives (keys, reasons) as shards are finished."""
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    settings, count = extractor.settings, len(missing)
    decoding = {
        "image_size": extractor.backbone.image_size,
        "max_pixels": extractor.max_pixels,
        "options": extractor.options,
    }
    arguments = {
        "folder": folder,
        "extractor": extractor,
        "dtype": resolve_dtype(settings.compute_dtype),
        "weights": ray.put(extractor.weights.read_bytes()) if folder.is_remote else None,  # the file is the driver's
    }
    few = count <= settings.max_images_for_tasks and not settings.gpus_per_actor
    # Blocks small enough that decoding spreads; for few images a block is a task and a shard.
    step = settings.rows_per_shard if few else max(1, min(settings.rows_per_shard, -(-count // 8)))
    source = ray.data.from_arrow([missing.slice(start, step).combine_chunks() for start in range(0, count, step)])
    if few:
        computed = source.map_batches(
            _decode_and_compute,  # type: ignore[arg-type]
            fn_kwargs={"decoding": decoding, **arguments},
            batch_size=None,
            compute=TaskPoolStrategy(size=settings.num_actors),
            num_cpus=1,
        )
    else:
        decoded = source.map_batches(
            decode_batch,  # type: ignore[arg-type]
            fn_kwargs=decoding,
            batch_size=None,
            num_cpus=0.4,  # not what the actors ask for: equal demands would fuse decoding into the actors
        )
        computed = decoded.map_batches(
            ShardWriter,
            fn_constructor_kwargs=arguments,
            batch_size=settings.rows_per_shard,
            compute=ActorPoolStrategy(size=settings.num_actors),
            num_cpus=0.5,
            num_gpus=settings.gpus_per_actor,
            runtime_env={"env_vars": ONE_ARENA},
        )
    for batch in computed.iter_batches(batch_size=None):
        yield batch["key"], batch["reason"]


def _decode_and_compute(
    batch: dict[str, np.ndarray], decoding: dict[str, Any], **arguments: Any
) -> dict[str, np.ndarray]:
    return _writer(**arguments)(decode_batch(batch, **decoding))


@lru_cache(maxsize=1)
def _writer(**arguments: Any) -> ShardWriter:
    """Made once in a process for all tasks of one extraction; the next one's takes its place."""
    return ShardWriter(**arguments)


class ShardWriter:
    """Pixels to features, written to a shard."""

    def __init__(self, folder: StoragePath, extractor: Extractor, dtype: str, weights: Any = None) -> None:
        """`weights`: a reference to the bytes of `extractor.weights` in Ray's object store; None: the file is here."""
        import torch

        from pipeline.runtime.cpu import computing_thread

        self.folder, self.settings = folder, extractor.settings
        self.device = torch.device("cuda" if extractor.settings.gpus_per_actor else "cpu")
        self.dtype = getattr(torch, dtype)
        self.transform = ImageTransform(extractor.backbone.image_size)
        self.thread = computing_thread(extractor.settings.threads_per_actor)
        self.backbone = self.thread.submit(self._loaded, extractor, weights).result()

    def _loaded(self, extractor: Extractor, weights: Any) -> Any:
        import ray

        from models.backbone import Backbone
        from pipeline.runtime.weights import load_weights

        backbone = Backbone(extractor.backbone)
        load_weights(backbone, extractor.weights, None if weights is None else ray.get(weights))
        return backbone.eval().to(self.device)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        reasons = batch["reason"].astype(object)
        good = np.flatnonzero(reasons == "")
        keys = [str(key) for key in batch["key"][good]]
        if keys and not has_shard(self.folder, keys):  # a task that is repeated may have written before it died
            features = self.thread.submit(self.features, batch["pixels"][good]).result()
            finite = np.isfinite(features).all(axis=(1, 2))
            reasons[good[~finite]] = f"its features are not finite in {self.settings.stored_dtype}"
            if finite.any():
                keys = [key for key, fine in zip(keys, finite, strict=True) if fine]
                write_shard(self.folder, keys, features[finite])
        return {"key": batch["key"], "reason": reasons.astype(str)}

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, H, W, 3) uint8 to (B, N, C) in the stored dtype.

        The last batch is filled up with black, because kernels are chosen by a batch's size: an image's features are
        then the same bits whatever was left to do beside it.
        """
        import torch

        size = self.settings.batch_size
        parts = []
        with torch.no_grad(), torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            for start in range(0, len(pixels), size):
                part = pixels[start : start + size]
                full = np.zeros((size, *pixels.shape[1:]), np.uint8)
                full[: len(part)] = part
                images = self.transform.normalize(torch.from_numpy(full).to(self.device))
                features = self.backbone(images)[: len(part)].float().cpu().numpy()
                with np.errstate(over="ignore"):  # what does not fit is quarantined by the caller
                    parts.append(features.astype(self.settings.stored_dtype))
        return np.concatenate(parts)


def _read_quarantine(folder: StoragePath) -> list[dict[str, Any]]:
    try:
        return read_table(folder / "quarantine.parquet", QUARANTINE).to_pylist()
    except FileNotFoundError:
        return []


def write_quarantine(folder: StoragePath, dataset: Dataset, bad: dict[str, str], unreadable: dict[str, str]) -> None:
    """Adds this extraction's troubled images to the list; those of other data sets stay, what was mended goes."""
    before = _read_quarantine(folder)
    troubled = dataset.table.filter(pc.is_in(dataset.table["key"], value_set=pa.array(list(bad), pa.string())))
    mine = pc.is_in(pa.array([row["uri"] for row in before], pa.string()), value_set=dataset.table["uri"]).to_pylist()
    rows = {row["uri"]: row for row, seen in zip(before, mine, strict=True) if not seen}
    for row in troubled.select(["uri", "key"]).to_pylist():
        rows[row["uri"]] = {"uri": row["uri"], "key": row["key"], "reason": bad[row["key"]]}
    for uri, reason in unreadable.items():
        rows[uri] = {"uri": uri, "key": None, "reason": f"{UNREADABLE}: {reason}"}
    after = sorted(rows.values(), key=lambda row: row["uri"])
    if after != before:
        write_table(folder / "quarantine.parquet", pa.Table.from_pylist(after, QUARANTINE))
