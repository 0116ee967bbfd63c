"""Model inputs: stored features of images, their pixels, or features that a frozen backbone computes from pixels.

`FeatureComputer` serves extractions and stages that compute features at each step, so that both get equal features.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn import functional as F

from raycap.models.base import Features, map_tensors
from raycap.models.config import Augmentation, BackboneConfig, Views, seed_of_key
from raycap.models.encoders.backbone import Backbone, image_transform
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import FeatureSection
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.images import (
    decode_image,
    is_remote_image,
    pixels_of,
    read_image_file,
)
from raycap.pipeline.features.store import FeatureStore
from raycap.pipeline.storage.cache import ImageCache, image_cache
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.weights import load_weights

T = TypeVar("T")
NUM_REMOTE_THREADS = 8  # threads per worker, which mostly wait for requests


class FeatureComputer:
    """A frozen backbone on a device, with the numeric settings of the feature store.

    On one kind of device, equal pixels, weights and settings give equal bits in every process.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        weights: Path,
        settings: FeatureSection,
        device: torch.device,
        data: bytes | None = None,
    ) -> None:
        """weights: the file. data: its content if it was read before. settings: `compute_dtype` is not auto."""
        self.settings, self.device, self.transform = settings, device, image_transform(backbone)
        self.dtype, self.stored = getattr(torch, settings.compute_dtype), getattr(torch, settings.stored_dtype)
        module = Backbone(backbone, with_weights=False)
        load_weights(module, weights, data)
        self.backbone: Callable[[Tensor], Tensor] = module.eval().to(device)

    def features(self, pixels: Tensor) -> Tensor:
        """The features (B, N, C) of pixels (B, H, W, 3) uint8, in the stored dtype, on the device."""
        return torch.cat(self.batches(pixels, lambda features: features))

    def batches(self, pixels: Tensor, take: Callable[[Tensor], T]) -> list[T]:
        """Computes features in batches of `settings.batch_size` images. Returns the result of `take` for each batch.

        pixels: (B, H, W, 3) uint8. take: called with features (b, N, C) in the stored dtype, on the device. Values too
        large for this dtype are infinite. The last batch is padded with black images, because torch selects its kernels
        by the batch size, and an image must have the same features in every batch.
        """
        size, taken = self.settings.batch_size, []
        with torch.no_grad(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for part in pixels.split(size):
                moved = F.pad(part.to(self.device, non_blocking=True), (0, 0, 0, 0, 0, 0, 0, size - len(part)))
                images = self.transform.normalize(moved)
                taken.append(take(self.backbone(images)[: len(part)].to(self.stored)))
        return taken


class Images:
    """Model inputs of a data set's images: features from a store, or pixels from the image files.

    Threads decode the images, because decoding and resizing release the interpreter's lock. With a cache, each image on
    S3 is downloaded once.
    """

    def __init__(
        self,
        dataset: Dataset,
        source: FeatureStore | ImageTransform,
        max_pixels: int,
        threads: int,
        options: StorageOptions = StorageOptions(),
        cache: ImageCache | None = None,
        views: Views | None = None,
    ) -> None:
        """source: the store of the features, or the transform of the pixels. Raises DamagedError for a missing feature.

        threads: the number that read and decode, at least NUM_REMOTE_THREADS if images are on S3. views: if given, a
        seed selects a stored view of an image, or makes a new view from the image file.
        """
        self.table, self.cache, self.views = dataset.table, cache, views
        self.image_ids = dataset.table["image_id"].to_numpy()
        self.max_pixels, self.options = max_pixels, options
        self.store = source if isinstance(source, FeatureStore) else None
        self.transform = source if isinstance(source, ImageTransform) else None
        if isinstance(source, FeatureStore):
            keys, suffixes = dataset.table["key"], ("",) if views is None else views.suffixes
            columns = [source.locate(pc.binary_join_element_wise(keys, suffix, "")) for suffix in suffixes]
            self.positions = np.stack(columns, axis=1)  # (images, views), in the store
        else:
            if any(map(is_remote_image, dataset.column("uri"))):
                threads = max(threads, NUM_REMOTE_THREADS)
            self.pool = ThreadPoolExecutor(max(1, threads))

    def __len__(self) -> int:
        return len(self.image_ids)

    def uri(self, row: int) -> str:
        """The URI of an image, which names a file or a part of an archive (`ImageLocation`)."""
        return str(self.table["uri"][int(row)].as_py())

    def load(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Features:
        """The stored features or the pixels of these rows. `on_device` converts them to model inputs.

        seeds: (len(rows),) uint64, each of which selects a view of a training image. From a store, the tokens are
        features (len(rows), N, C) in the stored dtype, and regions also have lengths and boxes. From image files, the
        tokens are resized pixels (len(rows), H, W, 3) uint8.
        """
        if self.store is None:
            pixels = self.pool.map(self._pixels, rows, [None] * len(rows) if seeds is None else seeds.tolist())
            return Features(torch.stack(list(pixels)))
        chosen = 0 if self.views is None or seeds is None else (seeds % np.uint64(self.views.count)).astype(np.int64)
        positions = self.positions[rows, chosen]
        tokens = torch.from_numpy(self.store.gather_at(positions))
        regions = self.store.regions_at(positions)
        return Features(tokens, *(None if values is None else torch.from_numpy(values) for values in regions))

    def _pixels(self, row: int, seed: int | None) -> Tensor:
        """The pixels (H, W, 3) uint8 of one image, or of the view that the seed selects."""
        assert self.transform is not None
        key = self.table["key"][int(row)].as_py()
        data = read_image_file(StoragePath(self.uri(row), self.options), key, self.cache)
        augmentation = Augmentation() if self.views is None else self.views.augmentation
        if self.views is None:
            seed = None
        elif self.views.as_stored and seed is not None:
            seed = seed_of_key(f"{key}{self.views.suffixes[seed % self.views.count]}")
        decoded = decode_image(data, self.max_pixels)
        return torch.from_numpy(pixels_of(decoded, self.transform, augmentation, seed).copy())


def model_inputs(config: RunConfig, part: Dataset, store: FeatureStore | None, views: Views | None = None) -> Images:
    """The model inputs of some images of a run: stored features, or pixels if `store` is None.

    views: of training images. If it is None, the images are not augmented.
    """
    source = image_transform(config.backbone) if store is None else store
    options, threads = config.storage.options, config.workers.num_decode_threads
    cache = image_cache(config.features.cache_bytes)
    return Images(part, source, config.data.max_pixels, threads, options, cache, views)


def on_device(
    features: Features,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    transform: ImageTransform | None = None,
) -> Features:
    """Converts the result of `Images.load` to model inputs of type `dtype` on `device`.

    The tensors are copied first and converted on the device, because float16 features have half the bytes of float32,
    and pixels a quarter. From pinned memory, the copy does not block. Pixels become normalized images (B, 3, H, W), for
    which `transform` must be given.
    """
    moved = map_tensors(features, lambda tensor: tensor.to(device, non_blocking=True))
    tokens = moved.tokens
    if tokens.dtype == torch.uint8:
        assert transform is not None
        tokens = transform.normalize(tokens)
    return replace(moved, tokens=tokens.to(dtype))
