"""Images in the forms in which callers have them: paths, URIs, bytes of files, Pillow's images and arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from raycap.pipeline.data.images import UNREADABLE, BadImage, convert_image, decode_image, read_image_file, reason_of
from raycap.pipeline.storage.path import StorageOptions, storage_path
from raycap.pipeline.storage.s3 import StorageError

ImageSource = str | Path | bytes | bytearray | memoryview | Image.Image | np.ndarray

MAX_PIXELS = 100_000_000  # Larger images are refused.


def load_image(
    source: ImageSource, max_pixels: int = MAX_PIXELS, options: StorageOptions = StorageOptions()
) -> Image.Image:
    """The RGB image of a source, rotated as its EXIF data demand.

    source: a path or s3:// URI, the bytes of an image file, an image of Pillow, or an array (H, W), (H, W, 3) or
    (H, W, 4) uint8. Raises BadImage with the reason for an image that cannot be used, and StorageError while the
    storage is out of order, because the image is not at fault.
    """
    if isinstance(source, str | Path):
        return decode_image(_read(source, options), max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), max_pixels)
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if not isinstance(source, Image.Image):
        raise BadImage(f"an image of the type {type(source).__name__}; give a path, bytes, a Pillow image or an array")
    return convert_image(source, max_pixels)


def _read(source: str | Path, options: StorageOptions) -> bytes:
    """The content of a file. Raises BadImage or StorageError."""
    try:
        return read_image_file(storage_path(source, options))
    except StorageError:
        raise  # an outage, or missing rights; the image is not at fault
    except OSError as error:
        raise BadImage(f"{UNREADABLE}: {reason_of(error)}") from error


def _from_array(array: np.ndarray) -> Image.Image:
    """The image of an array. Raises BadImage for other types and shapes."""
    has_channels = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not has_channels or 0 in array.shape:
        raise BadImage(
            f"an array {array.shape} of {array.dtype}; expected (H, W), (H, W, 3) or (H, W, 4) of uint8 values"
        )
    return Image.fromarray(array)
