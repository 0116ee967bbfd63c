"""Model inputs: stored features of images, or their pixels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from raycap.models.base import Features, map_tensors
from raycap.models.encoders.augmentation import augmented
from raycap.models.encoders.transform import ImageTransform
from raycap.models.encoders.views import seed_of_key
from raycap.pipeline.data.formats.location import ImageLocation, has_remote_image
from raycap.pipeline.data.images import MAX_BYTES, decode_image, read_image_file
from raycap.pipeline.storage.path import StorageOptions, StoragePath

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL import Image

    from raycap.models.encoders.views import Views
    from raycap.pipeline.data.dataset import Dataset
    from raycap.pipeline.features.store.store import FeatureStore
    from raycap.pipeline.storage.file_cache import ImageCache

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
        # The columns of a memory-mapped data set remain in its file, and `rows` are the images in it.
        self.dataset, self.rows, self.cache = dataset.whole, dataset.rows, cache
        self.image_ids = dataset.values("image_id").to_numpy()
        self.store, self.transform, self.max_pixels, self.options = store, transform, max_pixels, options
        self.positions = None if store is None else self._locate(store, dataset.values("key"))
        self.pool = None
        if store is None:
            if has_remote_image(dataset.values("uri")):
                threads = max(threads, NUM_REMOTE_THREADS)
            self.pool = ThreadPoolExecutor(max(1, threads))

    def __len__(self) -> int:
        return len(self.image_ids)

    def uri(self, row: int) -> str:
        """Where an image is: the text of an `ImageLocation`."""
        return str(self._value("uri", row))

    def _value(self, column: str, row: int) -> Any:
        return self.dataset.table[column][int(self.rows[row])].as_py()

    def load(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Features:
        """The inputs of these rows as they are stored, which `on_device` converts to model inputs.

        seeds: (len(rows),) uint64, which decide the views of training images; only `AugmentedImages` uses them.
        From a store, the tokens are features (len(rows), N, C) in the stored dtype; regions also have lengths and
        boxes. Without a store, the tokens are resized pixels (len(rows), H, W, 3) uint8.
        """
        if self.store is None or self.positions is None:
            assert self.pool is not None
            pixels = self.pool.map(self._pixels, rows, [None] * len(rows) if seeds is None else seeds.tolist())
            return Features(torch.stack(list(pixels)))
        positions = self._positions_at(rows, seeds)
        tokens = torch.from_numpy(self.store.gather_at(positions))
        regions = self.store.regions_at(positions)
        return Features(tokens, *(None if values is None else torch.from_numpy(values) for values in regions))

    def _locate(self, store: FeatureStore, content_keys: pa.ChunkedArray) -> np.ndarray:
        """The positions of the images in the store."""
        return store.locate(content_keys)

    def _positions_at(self, rows: np.ndarray, seeds: np.ndarray | None) -> np.ndarray:
        """The positions of these rows in the store."""
        assert self.positions is not None
        return self.positions[rows]

    def _decoded(self, row: int) -> Image.Image:
        """The image of a row."""
        image, key = ImageLocation.parse(self.uri(row), self.options), self._value("key", row)
        if self.cache is not None and image.is_remote and key:
            return decode_image(self.cache.read(image, key, MAX_BYTES), self.max_pixels)
        return decode_image(read_image_file(StoragePath(self.uri(row), self.options), key), self.max_pixels)

    def _pixels(self, row: int, seed: int | None) -> Tensor:
        """The resized pixels (H, W, 3) uint8 of one image."""
        assert self.transform is not None
        return torch.from_numpy(self.transform.resize(self._decoded(row)).copy())


class AugmentedImages(Images):
    """Training images, of which a seed decides the view: a stored one, or without a store a new one."""

    def __init__(self, views: Views, *arguments: Any) -> None:
        """arguments: those of `Images`."""
        self.views = views
        super().__init__(*arguments)

    def _locate(self, store: FeatureStore, content_keys: pa.ChunkedArray) -> np.ndarray:
        import pyarrow.compute as pc

        columns = [
            store.locate(pc.binary_join_element_wise(content_keys, suffix, "")) for suffix in self.views.suffixes
        ]
        return np.stack(columns, axis=1)

    def _positions_at(self, rows: np.ndarray, seeds: np.ndarray | None) -> np.ndarray:
        assert self.positions is not None and seeds is not None
        return self.positions[rows, (seeds % np.uint64(self.views.count)).astype(np.int64)]

    def _pixels(self, row: int, seed: int | None) -> Tensor:
        assert self.transform is not None and seed is not None
        pixels = augmented(self._decoded(row), self.views.augmentation, seed, self.transform.resize)
        return torch.from_numpy(pixels.copy())


class StoredViews(AugmentedImages):
    """Training images as pixels of the views that a store would have, of which a seed selects one."""

    def _pixels(self, row: int, seed: int | None) -> Tensor:
        assert seed is not None
        key = f"{self._value('key', row)}{self.views.suffixes[seed % self.views.count]}"
        return super()._pixels(row, seed_of_key(key))


def on_device(
    features: Features,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    transform: ImageTransform | None = None,
) -> Features:
    """Model inputs of type `dtype` on `device` from the inputs of `Images.load`; pixels need its transform.

    The inputs are copied as they are stored, which is half the bytes for float16 features and a quarter for pixels, and
    converted on the device. From pinned memory the copy does not wait for the device. Pixels become normalized images
    (B, 3, H, W).
    """
    moved = map_tensors(features, lambda tensor: tensor.to(device, non_blocking=True))
    tokens = moved.tokens
    if tokens.dtype == torch.uint8:
        assert transform is not None
        tokens = transform.normalize(tokens).contiguous()
    return replace(moved, tokens=tokens.to(dtype))
