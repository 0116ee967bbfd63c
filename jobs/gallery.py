"""Heat maps for the pictures of a report, computed by one Ray task where the models run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.config import RunConfig
from pipeline.report import MAX_IMAGES, ReportImage, choose_images


def with_attention(images: Sequence[ReportImage], bundle: Path, config: RunConfig, seed: str) -> list[ReportImage]:
    """The images with the maps of the captions that a bundle gave them; only those that the page will show get theirs.

    Ray must have been started. Files that cannot be read, and models without a grid or cross-attention, give no map.
    """
    import ray

    chosen, _ = choose_images(images, MAX_IMAGES, seed=seed)
    workers = config.workers
    task = ray.remote(_maps).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    asked = [(image.split, image.image_id, str(image.path), image.caption) for image in chosen]
    maps = ray.get(task.remote(asked, bundle, config))
    return [replace(image, attention=maps.get((image.split, image.image_id))) for image in images]


def _maps(
    asked: list[tuple[str, int | str, str, str]], bundle: Path, config: RunConfig
) -> dict[tuple[str, int | str], np.ndarray]:
    from pipeline.bundle import load_bundle
    from pipeline.context import device_for
    from pipeline.images import BadImage
    from pipeline.processor import prepare_processor
    from pipeline.serving import CaptionService
    from pipeline.storage import place

    prepare_processor(config.workers.threads_per_worker)
    loaded = load_bundle(bundle)
    if loaded.transform is None:
        return {}
    device = device_for(config.workers.gpus_per_worker)
    loaded.captioner.to(device)
    service, found = CaptionService(loaded), {}
    for split, image, uri, caption in asked:
        try:
            pixels = service.pixels(place(uri, config.storage.options).read_bytes()).to(device)
        except (BadImage, OSError):
            continue
        found[(split, image)] = service.attention(pixels, caption).float().cpu().numpy().astype(np.float16)
    return found
