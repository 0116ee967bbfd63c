"""Image files to RGB pixels, as an image viewer shows them; every failure has a reason.

This module does not import torch, so that Ray's decoding tasks start fast.
"""

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

UNREADABLE = "cannot be read"  # starts the reason of a temporary failure, which the next extraction tries again


class BadImage(Exception):
    """An image that cannot be used; the message is the reason listed in the quarantine."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """RGB image from file bytes: EXIF rotation applied, alpha over white, grayscale, CMYK, palette, 16-bit converted.

    Raises BadImage for empty, truncated, oversized (width x height above `max_pixels`) or unreadable bytes.
    """
    if not data:
        raise BadImage("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(data))
        if image.width * image.height > max_pixels:
            raise BadImage(f"{image.width} x {image.height} pixels, more than {max_pixels}")
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except BadImage:
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("not an image in a known format") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, IndexError, TypeError) as error:
        raise BadImage(f"cannot be decoded: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I", "F"):
        return _from_16_bit(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Grayscale of more than 8 bits: Pillow's own conversion clips at 255, a viewer scales."""
    values = np.asarray(image).astype(np.float64)
    top = 65535.0 if values.max(initial=0) > 255 else 255.0
    return Image.fromarray(np.clip(values * (255.0 / top) + 0.5, 0, 255).astype(np.uint8)).convert("RGB")


def decode_batch(
    batch: dict[str, np.ndarray], image_size: int, max_pixels: int, options: StorageOptions = StorageOptions()
) -> dict[str, Any]:
    """Columns key and uri to columns key, pixels (B, H, W, 3) uint8, resized, and reason.

    The reason is "" for a decoded image; an image that cannot be used is black. `key` is the expected sha256 of the
    file: one that has changed since is an image that cannot be read.
    """
    transform = ImageTransform(image_size)
    pixels = np.zeros((len(batch["key"]), image_size, image_size, 3), np.uint8)

    def decode(index: int) -> str:
        try:
            data = StoragePath(str(batch["uri"][index]), options).read_bytes()
            if hashlib.sha256(data).hexdigest() != batch["key"][index]:
                return f"{UNREADABLE}: it changed while it was being extracted"
            pixels[index] = transform.resize(decode_image(data, max_pixels))
        except BadImage as error:
            return str(error)
        except OSError as error:
            return f"{UNREADABLE}: {error.strerror or error}"
        return ""

    if any(is_remote(str(uri)) for uri in batch["uri"]):
        with ThreadPoolExecutor(8) as pool:  # requests spend most of their time waiting
            reasons = list(pool.map(decode, range(len(pixels))))
    else:
        reasons = [decode(index) for index in range(len(pixels))]
    return {"key": batch["key"], "pixels": pixels, "reason": np.array(reasons)}
