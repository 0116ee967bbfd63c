"""Model inputs: stored features of images, or their pixels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from models.base import Features, map_tensors
from models.transform import ImageTransform, normalize
from pipeline.data.images import MAX_BYTES, decode_image, read_image_file
from pipeline.storage.path import StorageOptions, StoragePath, is_remote

if TYPE_CHECKING:
    from pipeline.data.dataset import Dataset
    from pipeline.features.store import FeatureStore
    from pipeline.storage.file_cache import ImageCache

NUM_REMOTE_THREADS = 8  # threads per worker; they mostly wait for requests


class Images:
    """Model inputs of a data set's images: features from `store`, or without a store pixels, which need `transform`.

    Threads decode the images, because decoding and resizing release the interpreter's lock. Images on S3 are read in
    parallel, and with a cache only once.
    """

    def __init__(
        self,
        dataset: Dataset,
        store: FeatureStore | None,
        transform: ImageTransform | None,
        max_pixels: int,
        threads: int,
        options: StorageOptions = StorageOptions(),
        cache: ImageCache | None = None,
    ) -> None:
        """threads: the number of threads that read and decode; images on S3 get at least NUM_REMOTE_THREADS."""
        self.uris, self.keys, self.cache = dataset.column("uri"), dataset.column("key"), cache
        self.image_ids = np.array(dataset.column("image_id"), np.int64)
        self.store, self.transform, self.max_pixels, self.options = store, transform, max_pixels, options
        self.positions = store.locate(dataset.table["key"]) if store is not None else None
        if any(is_remote(uri) for uri in self.uris):
            threads = max(threads, NUM_REMOTE_THREADS)
        self.pool = ThreadPoolExecutor(max(1, threads)) if store is None else None

    def __len__(self) -> int:
        return len(self.uris)

    def load(self, rows: np.ndarray) -> Features:
        """The inputs of these rows as they are stored, which `on_device` converts to model inputs.

        From a store, the tokens are features (len(rows), N, C) in the stored dtype; regions also have lengths and
        boxes. Without a store, the tokens are resized pixels (len(rows), H, W, 3) uint8.
        """
        if self.store is None or self.positions is None:
            assert self.pool is not None
            return Features(torch.stack(list(self.pool.map(self._pixels, rows))))
        tokens = torch.from_numpy(self.store.gather_at(self.positions[rows]))
        regions = self.store.regions_at(self.positions[rows])
        return Features(tokens, *(None if values is None else torch.from_numpy(values) for values in regions))

    def _pixels(self, row: int) -> Tensor:
        """The resized pixels (H, W, 3) uint8 of one image."""
        assert self.transform is not None
        path, key = StoragePath(self.uris[row], self.options), self.keys[row]
        data = self.cache.read(path, key, MAX_BYTES) if self.cache and path.is_remote and key else read_image_file(path)
        return torch.from_numpy(self.transform.resize(decode_image(data, self.max_pixels)).copy())


def on_device(features: Features, device: torch.device, dtype: torch.dtype = torch.float32) -> Features:
    """Model inputs of type `dtype` on `device` from the inputs of `Images.load`.

    The inputs are copied as they are stored, which is half the bytes for float16 features and a quarter for pixels, and
    converted on the device. From pinned memory the copy does not wait for the device. Pixels become normalized images
    (B, 3, H, W).
    """
    moved = map_tensors(features, lambda tensor: tensor.to(device, non_blocking=True))
    tokens = normalize(moved.tokens).contiguous() if moved.tokens.dtype == torch.uint8 else moved.tokens
    return replace(moved, tokens=tokens.to(dtype))
