"""Captions of very many images through Ray Data: read and decoded in CPU tasks, captioned by a pool of actors.

Only names and captions travel back. Memory: the names in the driver; blocks of at most `BLOCK` pictures in the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.captioning.service import MAX_PIXELS, CaptionService
from pipeline.data.images import BadImage, decode_image
from pipeline.storage.path import storage_path

BLOCK = 64


def caption_stream(
    names: Sequence[str], bundle: Path, settings: dict[str, Any]
) -> Iterator[tuple[str, list[tuple[str, float]], str]]:
    """(name, captions with their log-probabilities best first, reason why there are none), in order.

    Ray must have been started. `bundle` and local names must be readable from every node. A GPU an actor where the
    cluster has them, else half a processor's core.
    """
    import ray
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    gpus = int(ray.cluster_resources().get("GPU", 0))
    from pipeline.captioning.bundle import load_bundle

    transform = load_bundle(bundle).transform
    assert transform is not None
    blocks = max(1, -(-len(names) // BLOCK))
    decoded = ray.data.from_items([{"name": name} for name in names], override_num_blocks=blocks).map_batches(
        _decode,  # type: ignore[arg-type]
        fn_kwargs={"image_size": transform.image_size},
        batch_size=None,
        num_cpus=0.4,  # not what the actors ask for: equal demands would fuse decoding into the actors
    )
    captioned = decoded.map_batches(
        _Captions,
        fn_constructor_kwargs={"bundle": bundle, "settings": settings, "gpu": gpus > 0},
        batch_size=BLOCK // 2,
        compute=ActorPoolStrategy(size=max(1, gpus)),
        num_cpus=0.5,
        num_gpus=1 if gpus else 0,
    )
    for batch in captioned.iter_batches(batch_size=None):
        for name, texts, values, reason in zip(
            batch["name"], batch["captions"], batch["log_probs"], batch["reason"], strict=True
        ):
            yield str(name), [(str(t), float(v)) for t, v in zip(texts, values, strict=True)], str(reason)


def _decode(batch: dict[str, np.ndarray], image_size: int) -> dict[str, Any]:
    """name to pixels (B, H, W, 3) uint8 resized, reason; a troubled image is black with its reason."""
    from models.transform import ImageTransform

    transform = ImageTransform(image_size)
    pixels = np.zeros((len(batch["name"]), image_size, image_size, 3), np.uint8)
    reasons = []
    for index, name in enumerate(batch["name"]):
        reason = ""
        try:
            pixels[index] = transform.resize(decode_image(storage_path(str(name)).read_bytes(), MAX_PIXELS))
        except BadImage as error:
            reason = str(error)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        reasons.append(reason)
    return {"name": batch["name"], "pixels": pixels, "reason": np.array(reasons)}


class _Captions:
    """An actor with the bundle loaded."""

    def __init__(self, bundle: Path, settings: dict[str, Any], gpu: bool) -> None:
        import torch

        from pipeline.captioning.bundle import load_bundle
        from pipeline.runtime.cpu import prepare_processor

        prepare_processor()
        loaded = load_bundle(bundle)
        self.device = torch.device("cuda" if gpu else "cpu")
        loaded.captioner.to(self.device)
        settings = dict(settings)
        self.num_results = settings.pop("num_results")
        self.service = CaptionService(loaded, **settings)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        import torch

        good = [index for index, reason in enumerate(batch["reason"]) if not reason]
        texts: list[list[str]] = [[] for _ in batch["reason"]]
        values: list[list[float]] = [[] for _ in batch["reason"]]
        if good:
            pixels = torch.from_numpy(np.stack([batch["pixels"][index] for index in good])).to(self.device)
            found = self.service.caption(self.service.transform.normalize(pixels), self.num_results)
            for index, hypotheses in zip(good, found, strict=True):
                texts[index] = [text for text, _ in hypotheses]
                values[index] = [value for _, value in hypotheses]
        import pyarrow as pa

        return {
            "name": batch["name"],
            "captions": pa.array(texts, pa.list_(pa.string())),
            "log_probs": pa.array(values, pa.list_(pa.float64())),
            "reason": batch["reason"],
        }
