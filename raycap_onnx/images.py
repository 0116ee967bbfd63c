"""Turns images into the pixels that a captioner reads, exactly as raycap does."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from raycap_onnx.description import CaptionerError, is_number, one_line, read_file, require_flags, require_number

ImageSource: TypeAlias = "str | Path | bytes | Image.Image"

INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # Pillow's filters
MAX_SIZE = 4096  # the largest side in pixels of the square that an image is resized to
MIN_STD = 1e-30  # smaller numbers may be 0 as float32
# The formats of image files, and the limits of their sizes, as in raycap. A side is limited because resizing takes 16
# bytes for each of its pixels. A WebP file may have half of the pixels, because Pillow needs twice the memory for it.
FILE_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF")
MAX_IMAGE_BYTES, MAX_PIXELS, MAX_IMAGE_SIDE, MAX_WEBP_SHARE = 256 * 2**20, 100_000_000, 2**20, 0.5
TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of a TIFF file
MAX_ASPECT_RATIO = 16  # A longer image is cut to this ratio before scaling, as only its middle remains in the end.
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # Pillow's modes with more than 8 bits


@dataclass(frozen=True)
class Transform:
    """Resizes an image with antialiasing, crops it to the square in the middle, and normalizes the pixels.

    scaled_side: length in pixels before the crop, of the shorter side if keep_aspect is true, otherwise of both sides.
    mean, std: of the three channels. Raises CaptionerError for values out of range.
    """

    image_size: int
    scaled_side: int
    keep_aspect: bool
    interpolation: str
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        require_number(self.image_size, "image_size", 1, MAX_SIZE)
        require_number(self.scaled_side, "scaled_side", self.image_size, 2 * self.image_size)
        require_flags(self, "keep_aspect")
        if self.interpolation not in INTERPOLATIONS:
            raise CaptionerError(f"interpolation is {self.interpolation!r:.80}; none of {INTERPOLATIONS}")
        if not len(self.mean) == len(self.std) == 3 or not all(map(is_number, [*self.mean, *self.std])):
            raise CaptionerError("mean and std must be 3 numbers each")
        if min(self.std) < MIN_STD:
            raise CaptionerError("std must be above 0")

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Normalized pixels (3, H, W) float32 of an RGB image."""
        width = height = self.scaled_side
        if self.keep_aspect:
            image = _without_far_ends(image)
            shorter = min(image.size)
            width, height = (self.scaled_side * length // shorter for length in image.size)
        resized = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        left, top = (round((length - self.image_size) / 2) for length in (width, height))
        square = resized.crop((left, top, left + self.image_size, top + self.image_size))
        pixels = np.asarray(square, np.float32) / np.float32(255.0)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))


def _without_far_ends(image: Image.Image) -> Image.Image:
    """Cuts the ends off an image whose longer side is more than MAX_ASPECT_RATIO times the shorter side."""
    longest = MAX_ASPECT_RATIO * min(image.size)
    if max(image.size) <= longest:
        return image
    left, top = (max(0, length - longest) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top))


def load_image(source: ImageSource) -> Image.Image:
    """The RGB image of a source, rotated as its EXIF data say. Transparent pixels are blended with white.

    source: a path, the content of a file, or an image of Pillow. Raises CaptionerError if the source is not an image,
    or is a damaged or too large one.
    """
    name = str(source) if isinstance(source, str | Path) else "an image"
    try:
        with warnings.catch_warnings():  # of damaged metadata, and of large images, which `_opened` refuses
            warnings.simplefilter("ignore")
            image = _opened(source)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except CaptionerError as error:
        raise CaptionerError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error
    except Image.UnidentifiedImageError as error:
        raise CaptionerError(f"{name}: it is not an image in a known format") from error
    except Exception as error:  # any type, because Pillow raises nearly all of them for damaged files
        raise CaptionerError(f"{name}: it cannot be decoded: {one_line(error)}") from error


def _opened(source: ImageSource) -> Image.Image:
    """Opens the image of a source. A file is not decoded yet.

    Raises CaptionerError if the image, or a tile of a TIFF file, has too many pixels or too long a side.
    """
    if isinstance(source, Image.Image):
        image = source
    else:
        data = source if isinstance(source, bytes) else read_file(Path(source), MAX_IMAGE_BYTES)
        image = Image.open(io.BytesIO(data), formats=FILE_FORMATS)
    sizes = [image.size]
    if isinstance(image, TiffImageFile):  # a tile is decoded as a whole, and may be larger than the image
        sizes.append((int(image.tag_v2.get(TILE_WIDTH, 1)), int(image.tag_v2.get(TILE_LENGTH, 1))))
    limit = int(MAX_PIXELS * (MAX_WEBP_SHARE if image.format == "WEBP" else 1))
    for width, height in sizes:
        if width * height > limit or max(width, height) > MAX_IMAGE_SIDE:
            raise CaptionerError(
                f"it has {width} x {height} pixels; the limit is {limit}, and {MAX_IMAGE_SIDE} for a side"
            )
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any Pillow mode to RGB."""
    if image.mode in DEEP_MODES:  # scaled to 8 bits, because Pillow's conversion would clip the values at 255
        values = np.asarray(image).astype(np.float64)
        white = 65535.0 if values.max() > 255 else 255.0
        image = Image.fromarray(np.clip(values * (255.0 / white) + 0.5, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer).convert("RGB")
    return image.convert("RGB")
