"""Heat maps, attributions and clusters for the pictures of a report, computed by one Ray task where the models run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.reports.page import MAX_IMAGES, ReportImage, choose_images
from pipeline.storage.path import StoragePath, place

if TYPE_CHECKING:
    from torch import Tensor

    from models.base import Features
    from pipeline.captioning.bundle import Bundle

ATTRIBUTED = 24  # pictures with attributions: a backward pass for each word and step
STEPS = 16  # of the integral; the picture does not change with more
SECONDS = 60.0  # after which no more of them are begun

Key = tuple[str, int | str]  # split and image id
Asked = tuple[str, int | str, str, str]  # split, image id, URI, caption


def with_attention(
    images: Sequence[ReportImage],
    bundle: Path,
    config: RunConfig,
    seed: str,
    store: StoragePath | None = None,
    dataset: Dataset | None = None,
) -> list[ReportImage]:
    """The images with the maps of the captions that a bundle gave them; only those that the page will show get theirs.

    store and dataset: the features of a bundle without a backbone, and the images with their keys. Attributions are for
    the `ATTRIBUTED` that a page of so many would show, as far as `SECONDS` reach. Ray must have been started. Files
    that cannot be read, and models whose image tokens are neither a square grid nor regions with boxes, give no map.
    """
    import ray

    chosen, _ = choose_images(images, MAX_IMAGES, seed=seed)
    attributed = {(image.split, image.image_id) for image in choose_images(chosen, ATTRIBUTED, seed=seed)[0]}
    chosen.sort(key=lambda image: (image.split, image.image_id) not in attributed)
    workers = config.workers
    task = ray.remote(_maps).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    asked = [(image.split, image.image_id, str(image.path), image.caption) for image in chosen]
    maps = ray.get(task.remote(asked, attributed, bundle, config, store, dataset))
    return [replace(image, **maps.get((image.split, image.image_id), {})) for image in images]


def _maps(
    asked: list[Asked],
    attributed: set[Key],
    bundle: Path,
    config: RunConfig,
    store: StoragePath | None,
    dataset: Dataset | None,
) -> dict[Key, dict[str, Any]]:
    """The fields of a `ReportImage` that a model gives, of each image."""
    import torch

    from models.attention_maps import cross_attention
    from models.attribution import Quadrature, integrated_gradients
    from models.cluster_groups import find_clusters
    from pipeline.captioning.bundle import load_bundle
    from pipeline.reports.cluster_pictures import layer_colors
    from pipeline.reports.heat_maps import region_maps
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor

    prepare_processor(config.workers.threads_per_worker)
    loaded = load_bundle(bundle)
    device = device_for(config.workers.gpus_per_worker)
    model, vocabulary = loaded.captioner.to(device).model, loaded.vocabulary
    begin = time.monotonic()
    found: dict[Key, dict[str, Any]] = {}
    for (split, image, _, caption), features, size in _inputs(asked, loaded, config, store, dataset):
        words, boxes, features = caption.split(), features.boxes, features.to(device)
        ids = torch.tensor(vocabulary.encode(words)[: model.sizes.max_positions + 1], device=device)

        def drawn(weights: Tensor, boxes: Tensor | None = boxes, size: tuple[int, int] = size) -> np.ndarray:
            maps = weights.float().cpu().numpy()
            return maps if boxes is None else region_maps(maps, boxes[0].numpy(), size)

        with torch.no_grad():
            memory = model.encode(features)
        own: dict[str, Any] = {"attention": drawn(cross_attention(model, memory, ids[None])[-1, 0, : len(words)])}
        if (split, image) in attributed and time.monotonic() - begin < SECONDS:
            spoke = integrated_gradients(model, features, ids, quadrature=Quadrature.exactly(STEPS))
            own["attribution"] = drawn(spoke.head(len(words)).shares())
        clusters = find_clusters(model, features, ids[: len(words) + 1])
        if clusters is not None:
            own["clusters"] = layer_colors(clusters)
        found[(split, image)] = own
    return found


def _inputs(
    asked: list[Asked], loaded: Bundle, config: RunConfig, store: StoragePath | None, dataset: Dataset | None
) -> Iterator[tuple[Asked, Features, tuple[int, int]]]:
    """Each image's features (1, N, C), and for regions with boxes the picture's width and height."""
    import torch

    from models.base import Features
    from pipeline.captioning.service import MAX_PIXELS, CaptionService
    from pipeline.data.images import BadImage, decode_image
    from pipeline.features.model_inputs import Images
    from pipeline.features.store import open_store

    if loaded.transform is not None:
        service = CaptionService(loaded)
        device = next(loaded.captioner.parameters()).device
        for each in asked:
            try:
                pixels = service.pixels(place(each[2], config.storage.options).read_bytes()).to(device)
            except (BadImage, OSError):
                continue
            with torch.no_grad():
                yield each, loaded.captioner.features(Features(pixels[None])), (0, 0)
        return
    if store is None or dataset is None:
        return
    options = config.storage.options
    images = Images(dataset, open_store(store, config.features), None, config.data.max_pixels, 1, options)
    rows = {int(image): row for row, image in enumerate(images.image_ids)}
    for each in asked:
        row = np.array([rows[int(each[1])]])
        features = images.load(row)
        if features.lengths is None or features.boxes is None:
            yield each, Features(features.tokens), (0, 0)
            continue
        try:
            size = decode_image(place(each[2], options).read_bytes(), MAX_PIXELS).size
        except (BadImage, OSError):
            continue
        count = int(features.lengths[0])
        if count:
            yield each, Features(features.tokens[:, :count], boxes=features.boxes[:, :count]), size
