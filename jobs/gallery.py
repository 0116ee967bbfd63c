"""Heat maps, attributions and clusters for the pictures of a report, computed by one Ray task where the models run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.report import MAX_IMAGES, ReportImage, choose_images

ATTRIBUTED = 24  # pictures with attributions: a backward pass for each word and step
STEPS = 16  # of the integral; the picture does not change with more
SECONDS = 60.0  # after which no more of them are begun

Key = tuple[str, int | str]  # split and image id


def with_attention(images: Sequence[ReportImage], bundle: Path, config: RunConfig, seed: str) -> list[ReportImage]:
    """The images with the maps of the captions that a bundle gave them; only those that the page will show get theirs.

    Attributions are for the `ATTRIBUTED` of them that a page of so many would show, as far as `SECONDS` reach. Ray must
    have been started. Files that cannot be read, and models without a grid or cross-attention, give no map.
    """
    import ray

    chosen, _ = choose_images(images, MAX_IMAGES, seed=seed)
    attributed = {(image.split, image.image_id) for image in choose_images(chosen, ATTRIBUTED, seed=seed)[0]}
    chosen.sort(key=lambda image: (image.split, image.image_id) not in attributed)
    workers = config.workers
    task = ray.remote(_maps).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    asked = [(image.split, image.image_id, str(image.path), image.caption) for image in chosen]
    maps = ray.get(task.remote(asked, attributed, bundle, config))
    return [replace(image, **maps.get((image.split, image.image_id), {})) for image in images]


def _maps(
    asked: list[tuple[str, int | str, str, str]], attributed: set[Key], bundle: Path, config: RunConfig
) -> dict[Key, dict[str, Any]]:
    """The fields of a `ReportImage` that a model gives, of each image."""
    from pipeline.bundle import load_bundle
    from pipeline.cluster_pictures import layer_colors
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
    service, begin = CaptionService(loaded), time.monotonic()
    found: dict[Key, dict[str, Any]] = {}
    for split, image, uri, caption in asked:
        try:
            pixels = service.pixels(place(uri, config.storage.options).read_bytes()).to(device)
        except (BadImage, OSError):
            continue
        own: dict[str, Any] = {"attention": service.attention(pixels, caption).float().cpu().numpy()}
        if (split, image) in attributed and time.monotonic() - begin < SECONDS:
            own["attribution"] = service.attribution(pixels, caption, STEPS).shares().float().cpu().numpy()
        clusters = service.clusters(pixels, caption)
        if clusters is not None:
            own["clusters"] = layer_colors(clusters)
        found[(split, image)] = own
    return found
