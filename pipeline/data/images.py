"""Decodes image files to RGB pixels. This module does not import torch, so that Ray's decoding tasks start fast."""

from __future__ import annotations

import hashlib
import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from models.transform import ImageTransform
from pipeline.storage.path import StorageOptions, StoragePath, is_remote
from pipeline.storage.s3 import StorageError

UNREADABLE = "cannot be read"  # a reason that starts with this is temporary: the next extraction tries the image again


class BadImage(Exception):
    """An image that cannot be used; the message is the reason listed in the quarantine."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """The RGB image in a file's bytes, rotated as its EXIF data demand. Transparent pixels are blended with white.

    Raises BadImage for empty, truncated, oversized (width x height above `max_pixels`) or unreadable bytes.
    """
    if not data:
        raise BadImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels is checked below instead
            image = Image.open(io.BytesIO(data))
        if image.width * image.height > max_pixels:
            raise BadImage(f"{image.width} x {image.height} pixels, more than {max_pixels}")
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except Image.UnidentifiedImageError as error:
        raise BadImage("not an image in a known format") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, IndexError, TypeError) as error:
        raise BadImage(f"cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any Pillow mode as RGB."""
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I", "F"):
        # More than 8 bits are scaled to 8 bits, as viewers do; Pillow's conversion would clip them at 255.
        values = np.asarray(image).astype(np.float64)
        white = 65535.0 if values.max(initial=0) > 255 else 255.0
        image = Image.fromarray(np.clip(values * (255.0 / white) + 0.5, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        background = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    return image.convert("RGB")


def decode_batch(
    batch: dict[str, np.ndarray], image_size: int, max_pixels: int, options: StorageOptions = StorageOptions()
) -> dict[str, Any]:
    """Decodes a batch with the columns key and uri. The result has the columns key, pixels and reason.

    pixels: (B, image_size, image_size, 3) uint8; black for an image that cannot be used. reason: why it cannot be used,
    or "". key: the expected sha256 of the file; a file that has changed counts as unreadable. Raises StorageError while
    the storage is out of order, because the images are not at fault.
    """
    transform = ImageTransform(image_size)
    pixels = np.zeros((len(batch["key"]), image_size, image_size, 3), np.uint8)

    def decode(index: int) -> str:
        """Writes the pixels of one image of the batch, and returns its reason."""
        try:
            data = StoragePath(str(batch["uri"][index]), options).read_bytes()
            if hashlib.sha256(data).hexdigest() != batch["key"][index]:
                return f"{UNREADABLE}: it changed while it was being extracted"
            pixels[index] = transform.resize(decode_image(data, max_pixels))
        except BadImage as error:
            return str(error)
        except StorageError:
            raise
        except OSError as error:
            return f"{UNREADABLE}: {error.strerror or error}"
        return ""

    # Requests spend most of their time waiting; local files are decoded one after the other.
    with ThreadPoolExecutor(8 if any(is_remote(str(uri)) for uri in batch["uri"]) else 1) as pool:
        reasons = list(pool.map(decode, range(len(pixels))))
    return {"key": batch["key"], "pixels": pixels, "reason": np.array(reasons)}
