"""Computes attention, attribution and cluster maps for the pictures of a report in one Ray task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.captioning.model_sources import ModelSource
from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.features.store import open_store
from pipeline.reports.page import MAX_IMAGES, ReportImage, choose_images
from pipeline.storage.path import StoragePath, storage_path

if TYPE_CHECKING:
    from torch import Tensor

    from models.base import Features
    from pipeline.captioning.bundle import Bundle

MAX_ATTRIBUTED_IMAGES = 24  # an attribution takes one backward pass per word and integration step
INTEGRATION_STEPS = 16  # with more steps, the picture looks the same
ATTRIBUTION_BUDGET_S = 60.0  # no attribution is started after this many seconds

ImageKey = tuple[str, int | str]  # split and image id


class MapRequest(NamedTuple):
    """A captioned image for which maps are to be computed."""

    split: str
    image_id: int | str
    uri: str
    caption: str
    with_attribution: bool = False


@dataclass(frozen=True)
class MapInputs:
    """The model that maps are computed for, and its inputs.

    store, dataset: the features, and the images with their keys in the store, for a model without a backbone.
    """

    model: ModelSource
    config: RunConfig
    store: StoragePath | None = None
    dataset: Dataset | None = None


def with_maps(images: Sequence[ReportImage], inputs: MapInputs, seed: str) -> list[ReportImage]:
    """Adds attention, attribution and cluster maps to the images that the page shows.

    `inputs.model` must be the model that wrote the captions. Ray must have been started.
    At most `MAX_ATTRIBUTED_IMAGES` images get an attribution, and fewer if `ATTRIBUTION_BUDGET_S` does not suffice. No
    maps are computed for files that cannot be read, nor for models whose image tokens are neither a square grid nor
    regions with boxes.
    """
    import ray

    shown, _ = choose_images(images, MAX_IMAGES, seed=seed)
    attributed = {_key(image) for image in choose_images(shown, MAX_ATTRIBUTED_IMAGES, seed=seed)[0]}
    requests = [
        MapRequest(
            image.split, image.image_id, str(image.path), image.caption, with_attribution=_key(image) in attributed
        )
        for image in sorted(shown, key=lambda image: _key(image) not in attributed)  # attributions come first
    ]
    workers = inputs.config.workers
    task = ray.remote(compute_maps).options(num_cpus=workers.cpus_per_worker, num_gpus=workers.gpus_per_worker)
    maps = ray.get(task.remote(requests, inputs))
    return [replace(image, **maps.get(_key(image), {})) for image in images]


def _key(image: ReportImage | MapRequest) -> ImageKey:
    return image.split, image.image_id


def compute_maps(requests: Sequence[MapRequest], inputs: MapInputs) -> dict[ImageKey, dict[str, Any]]:
    """The fields `attention`, `attribution` and `clusters` of each `ReportImage`, as far as they can be computed."""
    import torch

    from models.attention_maps import cross_attention
    from models.attribution import Quadrature, integrated_gradients
    from models.cluster_groups import find_clusters
    from pipeline.reports.cluster_pictures import layer_colors
    from pipeline.runtime.context import device_for
    from pipeline.runtime.cpu import prepare_processor

    workers = inputs.config.workers
    prepare_processor(workers.threads_per_worker)
    bundle = inputs.model.load()
    device = device_for(workers.gpus_per_worker)
    model = bundle.captioner.to(device).model
    begin = time.monotonic()
    maps: dict[ImageKey, dict[str, Any]] = {}
    for request, image in _loaded_images(requests, bundle, inputs):
        words = request.caption.split()
        ids = torch.tensor(bundle.vocabulary.encode(words)[: model.sizes.max_positions + 1], device=device)
        features = image.features.to(device)
        with torch.no_grad():
            memory = model.encode(features)
        attention = cross_attention(model, memory, ids[None])[-1, 0, : len(words)]  # the last layer, one row per word
        fields: dict[str, Any] = {"attention": image.paint(attention)}
        if request.with_attribution and time.monotonic() - begin < ATTRIBUTION_BUDGET_S:
            attribution = integrated_gradients(model, features, ids, quadrature=Quadrature.exactly(INTEGRATION_STEPS))
            fields["attribution"] = image.paint(attribution.head(len(words)).shares())
        clusters = find_clusters(model, features, ids[: len(words) + 1])
        if clusters is not None:
            fields["clusters"] = layer_colors(clusters)
        maps[_key(request)] = fields
    return maps


class _LoadedImage(NamedTuple):
    """The features of one image. `size` is the picture's width and height; it is set only for regions with boxes."""

    features: Features
    size: tuple[int, int] = (0, 0)

    def paint(self, weights: Tensor) -> np.ndarray:
        """Maps from weights (words, N). Weights of a grid are maps already; those of regions fill their boxes."""
        from pipeline.reports.heat_maps import region_maps

        values = weights.float().cpu().numpy()
        boxes = self.features.boxes
        return values if boxes is None else region_maps(values, boxes[0].numpy(), self.size)


def _loaded_images(
    requests: Sequence[MapRequest], bundle: Bundle, inputs: MapInputs
) -> Iterator[tuple[MapRequest, _LoadedImage]]:
    """The images that can be read, each with its features, which are computed or come from the store."""
    if bundle.transform is not None:
        yield from _from_files(requests, bundle, inputs)
    elif inputs.store is not None and inputs.dataset is not None:
        yield from _from_store(requests, inputs.store, inputs.dataset, inputs.config)


def _from_files(
    requests: Sequence[MapRequest], bundle: Bundle, inputs: MapInputs
) -> Iterator[tuple[MapRequest, _LoadedImage]]:
    """Computes the features of the images that can be read with the bundle's backbone."""
    import torch

    from models.base import Features
    from pipeline.captioning.service import CaptionService
    from pipeline.data.images import BadImage

    service = CaptionService(bundle)
    device = next(bundle.captioner.parameters()).device
    for request in requests:
        try:
            pixels = service.pixels(storage_path(request.uri, inputs.config.storage.options).read_bytes()).to(device)
        except (BadImage, OSError):
            continue
        with torch.no_grad():
            features = bundle.captioner.features(Features(pixels[None]))
        yield request, _LoadedImage(features)


def _from_store(
    requests: Sequence[MapRequest], store: StoragePath, dataset: Dataset, config: RunConfig
) -> Iterator[tuple[MapRequest, _LoadedImage]]:
    """Reads the images' features from the store. Only for regions with boxes the image itself is read, for its size."""
    from models.base import Features
    from pipeline.captioning.service import MAX_PIXELS
    from pipeline.data.images import BadImage, decode_image
    from pipeline.features.model_inputs import Images

    options = config.storage.options
    feature_store = open_store(store, config.features)
    images = Images(
        dataset, feature_store, transform=None, max_pixels=config.data.max_pixels, threads=1, options=options
    )
    row_of = {int(image): row for row, image in enumerate(images.image_ids)}
    for request in requests:
        row = np.array([row_of[int(request.image_id)]])
        features = images.load(row)
        if features.lengths is None or features.boxes is None:
            yield request, _LoadedImage(Features(features.tokens))
            continue
        try:
            size = decode_image(storage_path(request.uri, options).read_bytes(), MAX_PIXELS).size
        except (BadImage, OSError):
            continue
        count = int(features.lengths[0])
        if count:  # an image may have no regions
            regions = Features(features.tokens[:, :count], boxes=features.boxes[:, :count])
            yield request, _LoadedImage(regions, size)
