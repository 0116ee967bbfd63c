"""Extraction: images to features in the store, with Ray Data (its only home).

A manifest of (key, path) -> bytes, decoded and resized in CPU tasks -> an actor pool with the backbone, which writes
shards itself; only keys and reasons travel back, so that features never enter the object store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from models.backbone import Backbone
from models.config import BackboneConfig
from models.transform import ImageTransform
from pipeline.config import FeatureSection
from pipeline.dataset import Dataset
from pipeline.images import decode_batch
from pipeline.store import FeatureStore, feature_key, mark_complete, remove_orphans, write_shard
from pipeline.weights import load_weights, weights_file_digest

QUARANTINE = pa.schema([("uri", pa.string()), ("key", pa.string()), ("reason", pa.string())])


@dataclass(frozen=True)
class Extractor:
    """What makes features: a backbone, the file with its weights, and the numeric settings."""

    backbone: BackboneConfig
    weights: Path  # safetensors with the backbone's state
    settings: FeatureSection
    max_pixels: int

    def describe(self) -> dict[str, Any]:
        """Everything that changes a feature; `compute: auto` is resolved here so that machines never mix precisions."""
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


def resolve_dtype(name: str) -> str:
    """`auto` is bfloat16 where the processor has it in hardware (CUDA from Ampere on, AVX512-BF16), else float32."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def extract(
    dataset: Dataset, features: Path, extractor: Extractor, start_ray: Callable[[], None], say: Callable[[str], None]
) -> tuple[Path, dict[str, str]]:
    """Features of every image of the data set, computed only where the store lacks them.

    Identical images are computed once. Returns the store's folder and {content key: reason} of images that cannot be
    decoded. Ray is started (`start_ray`) only when there is something to compute. Cost: one set of keys in the driver.
    """
    description = extractor.describe()
    folder = features / feature_key(description)
    remove_orphans(folder)
    store = FeatureStore(folder)
    bad = _read_quarantine(folder)
    wanted = dict(zip(dataset.column("key"), dataset.column("uri"), strict=True))
    missing = {key: uri for key, uri in wanted.items() if key not in store and key not in bad}
    say(
        f"features {folder.name}: {len(wanted) - len(missing)} of {len(wanted)} images there, {len(missing)} to compute"
    )
    if missing:
        start_ray()
        fresh: dict[str, str] = {}
        begin = time.monotonic()
        last, done = begin, 0
        for keys, reasons in _run(missing, folder, extractor):
            fresh.update({key: reason for key, reason in zip(keys, reasons, strict=True) if reason})
            done += len(keys)
            now = time.monotonic()
            if now - last > 5 or done == len(missing):
                rate = done / (now - begin)
                say(f"  {done}/{len(missing)} images, {rate:.0f} images/s, {(len(missing) - done) / rate:.0f} s left")
                last = now
        bad |= fresh
        _write_quarantine(folder, bad, wanted)
    mark_complete(folder, description, len(FeatureStore(folder)))
    return folder, {key: reason for key, reason in bad.items() if key in wanted}


def _run(missing: dict[str, str], folder: Path, extractor: Extractor) -> Iterator[tuple[list[str], list[str]]]:
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.WARNING)
    DataContext.get_current().enable_progress_bars = False
    settings = extractor.settings
    table = pa.table({"key": list(missing), "uri": list(missing.values())})
    step = max(1, min(settings.rows_per_shard, -(-len(missing) // 8)))  # blocks small enough that decoding spreads
    blocks = [table.slice(start, step) for start in range(0, len(missing), step)]
    decoded = ray.data.from_arrow(blocks).map_batches(
        decode_batch,  # type: ignore[arg-type]
        fn_kwargs={"image_size": extractor.backbone.image_size, "max_pixels": extractor.max_pixels},
        batch_size=None,
        num_cpus=0.4,  # not what the actors ask for: equal demands would fuse decoding into the actors
    )
    computed = decoded.map_batches(
        _Compute,
        fn_constructor_kwargs={
            "folder": str(folder),
            "extractor": extractor,
            "dtype": resolve_dtype(settings.compute_dtype),
        },
        batch_size=settings.rows_per_shard,
        compute=ActorPoolStrategy(size=settings.num_actors),
        num_cpus=0.5,
        num_gpus=settings.gpus_per_actor,
    )
    for batch in computed.iter_batches(batch_size=None):
        yield list(batch["key"]), list(batch["reason"])


class _Compute:
    """The actor: pixels to features, written to a shard."""

    def __init__(self, folder: str, extractor: Extractor, dtype: str) -> None:
        torch.set_num_threads(extractor.settings.threads_per_actor)
        self.folder = Path(folder)
        self.settings = extractor.settings
        self.device = torch.device("cuda" if extractor.settings.gpus_per_actor else "cpu")
        self.dtype = getattr(torch, dtype)
        self.transform = ImageTransform(extractor.backbone.image_size)
        backbone = Backbone(extractor.backbone)
        load_weights(backbone, extractor.weights)
        self.backbone = backbone.eval().to(self.device)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        good = np.flatnonzero(batch["reason"] == "")
        if len(good):
            features = self._features(batch["pixels"][good])
            write_shard(self.folder, [str(key) for key in batch["key"][good]], features)
        return {"key": batch["key"], "reason": batch["reason"]}

    @torch.inference_mode()
    def _features(self, pixels: np.ndarray) -> np.ndarray:
        stored = np.dtype(self.settings.stored_dtype)
        parts = []
        for start in range(0, len(pixels), self.settings.batch_size):
            images = self.transform.normalize(
                torch.tensor(pixels[start : start + self.settings.batch_size]).to(self.device)
            )
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                parts.append(self.backbone(images).float().cpu().numpy().astype(stored))
        return np.concatenate(parts)


def _read_quarantine(folder: Path) -> dict[str, str]:
    path = folder / "quarantine.parquet"
    if not path.is_file():
        return {}
    columns = pq.read_table(path, schema=QUARANTINE).to_pydict()
    return dict(zip(columns["key"], columns["reason"], strict=True))


def _write_quarantine(folder: Path, bad: dict[str, str], uris: dict[str, str]) -> None:
    if bad:
        rows = {"uri": [uris.get(key, "") for key in bad], "key": list(bad), "reason": list(bad.values())}
        temporary = folder / ".quarantine.tmp"
        pq.write_table(pa.table(rows, schema=QUARANTINE), temporary)
        temporary.replace(folder / "quarantine.parquet")
