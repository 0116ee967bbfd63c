"""Computes attention, attribution and cluster maps for the pictures of a report in one Ray task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raycap.pipeline.cluster.stalls import StallWatch
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.image_locations import read_image_file
from raycap.pipeline.data.images import BadImage, decode_image
from raycap.pipeline.evaluation.captioning.bundle import ModelSource
from raycap.pipeline.evaluation.reports.page import MAX_IMAGES, ReportImage, choose_images
from raycap.pipeline.features.store import open_store
from raycap.pipeline.runtime.processor import device_for, prepare_processor
from raycap.pipeline.storage.path import StoragePath

if TYPE_CHECKING:
    from torch import Tensor

    from raycap.models.base import Features
    from raycap.pipeline.evaluation.captioning.bundle import Bundle

MAX_ATTRIBUTED_IMAGES = 24  # an attribution takes one backward pass per word and integration step
INTEGRATION_STEPS = 16  # with more steps, the picture looks the same
ATTRIBUTION_BUDGET_S = 60.0  # no attribution is started after this many seconds

ImageKey = tuple[str, int | str]  # split and image id


def add_maps(
    images: Sequence[ReportImage],
    model: ModelSource,
    config: RunConfig,
    store: StoragePath | None,
    dataset: Dataset,
    *,
    seed: str,
) -> list[ReportImage]:
    """Adds attention, attribution and cluster maps to the images that the page shows.

    model: the model that wrote the captions. store: the features for a model without a backbone. dataset: contains the
    images. seed: that of the page, which shows a random part of the images. Ray must have been started.
    At most `MAX_ATTRIBUTED_IMAGES` images get an attribution, and fewer if `ATTRIBUTION_BUDGET_S` does not suffice. No
    maps are computed for files that cannot be read, nor for models whose image tokens are neither a square grid nor
    regions with boxes.
    """
    shown, _ = choose_images(images, MAX_IMAGES, seed=seed)
    attributed = {_key(image) for image in choose_images(shown, MAX_ATTRIBUTED_IMAGES, seed=seed)[0]}
    attributed_first = sorted(shown, key=lambda image: _key(image) not in attributed)
    workers, watch = config.workers, StallWatch("the report's maps", config.workers)
    arguments = (attributed_first, attributed, model, config.without_tracker(), store, dataset)
    with watch:
        maps = dict(watch.stream(compute_maps, [arguments], workers.task_options))
    return [replace(image, **maps.get(_key(image), {})) for image in images]


def _key(image: ReportImage) -> ImageKey:
    """Identifies an image, because an id can occur in several splits."""
    return image.split, image.image_id


def compute_maps(
    images: Sequence[ReportImage],
    attributed: Set[ImageKey],
    model: ModelSource,
    config: RunConfig,
    store: StoragePath | None,
    dataset: Dataset,
) -> Iterator[tuple[ImageKey, dict[str, Any]]]:
    """Yields the key of each image with its fields `parts`, `attention`, `attribution` and `clusters`, if they apply.

    attributed: the keys of the images that get an attribution. The other parameters are those of `add_maps`.
    """
    import torch

    from raycap.models.encoders.backbone import num_prefix_tokens
    from raycap.models.explain.attribution import Quadrature, cross_attention, integrated_gradients
    from raycap.models.explain.cluster_groups import find_clusters
    from raycap.pipeline.evaluation.reports.pictures import layer_colors
    from raycap.pipeline.features.model_inputs import on_device

    prepare_processor(config.workers.threads_per_worker)
    bundle = model.load()
    own = bundle.captioner.backbone
    num_prefix = num_prefix_tokens(config.backbone) if config.has_backbone else 0
    if own is not None:
        num_prefix = own.num_prefix_tokens
    device = device_for(config.workers.gpus_per_worker)
    caption_model = bundle.captioner.to(device).model
    begin = time.monotonic()
    for image, inputs, size in _load_inputs(images, bundle, config, store, dataset):
        words = bundle.vocabulary.tokens_of(image.caption)
        ids = torch.tensor(bundle.vocabulary.encode(words)[: caption_model.sizes.max_positions + 1], device=device)
        features = on_device(inputs, device)
        with torch.no_grad():
            memory = caption_model.encode(features)
        # (layers, H, 1, T - 1, N): of the last layer, the rows that predict the words and not EOS
        attention = cross_attention(caption_model, memory, ids[None])[-1, :, 0, : len(words)].mean(0)
        fields: dict[str, Any] = {"attention": _weight_maps(attention[:, num_prefix:], inputs, size)}
        if words != image.caption.split():
            fields["parts"] = bundle.vocabulary.parts(image.caption)
        if _key(image) in attributed and time.monotonic() - begin < ATTRIBUTION_BUDGET_S:
            quadrature = Quadrature.exactly(INTEGRATION_STEPS)
            attribution = integrated_gradients(caption_model, features, ids, quadrature=quadrature)
            shares = attribution.head(len(words)).shares()
            fields["attribution"] = _weight_maps(shares[:, num_prefix:], inputs, size)
        clusters = find_clusters(caption_model, features, ids[: len(words) + 1])
        if clusters is not None:
            fields["clusters"] = layer_colors(clusters)
        yield _key(image), fields


def _weight_maps(weights: Tensor, features: Features, size: tuple[int, int]) -> np.ndarray:
    """One map per word, from its weights (words, N).

    The weights of a grid are returned unchanged. The weight of a region is written into every pixel of its box. Weights
    of attended padding, which follow those of the regions, are left out.
    size: the image's width and height in pixels.
    """
    from raycap.pipeline.evaluation.reports.pictures import region_maps

    values = weights.float().cpu().numpy()
    if features.boxes is None:
        return values
    boxes = features.boxes[0].numpy()
    return region_maps(values[:, : len(boxes)], boxes, size)


def _load_inputs(
    images: Sequence[ReportImage], bundle: Bundle, config: RunConfig, store: StoragePath | None, dataset: Dataset
) -> Iterator[tuple[ReportImage, Features, tuple[int, int]]]:
    """Yields each readable image with its features, from the bundle's backbone or the store, and with its size.

    The size is the width and height in pixels for regions with boxes; otherwise it is not needed and is (0, 0). Images
    without regions are left out.
    """
    import torch

    from raycap.models.base import Features
    from raycap.pipeline.features.model_inputs import Images, on_device

    max_pixels, options = config.data.max_pixels, config.storage.options
    feature_store = open_store(store, config.features) if store is not None and bundle.transform is None else None
    inputs = Images(dataset, feature_store, bundle.transform, max_pixels, threads=1, options=options)
    row_of = {int(image_id): row for row, image_id in enumerate(inputs.image_ids)}
    device = next(bundle.captioner.parameters()).device
    for image in images:
        row, size = row_of[int(image.image_id)], (0, 0)
        try:
            features = inputs.load(np.array([row]))
            if features.lengths is not None and features.boxes is not None:
                size = decode_image(read_image_file(StoragePath(inputs.uri(row), options)), max_pixels).size
        except (BadImage, OSError):
            continue
        if bundle.transform is not None:
            with torch.no_grad():
                features = bundle.captioner.features(on_device(features, device, transform=bundle.transform))
        elif features.lengths is None or features.boxes is None:
            features = Features(features.tokens)
        else:
            count = int(features.lengths[0])
            if not count:
                continue
            features = Features(features.tokens[:, :count], boxes=features.boxes[:, :count])
        yield image, features, size
