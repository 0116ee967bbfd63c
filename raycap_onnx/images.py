"""Image files and arrays to the pixels that a captioner reads, exactly as raycap does it."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from raycap_onnx.documents import CaptionerError, Values, is_number, read_file

ImageSource: TypeAlias = "str | Path | bytes | Image.Image | np.ndarray"

INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # Pillow's
MAX_SIZE = 4096  # pixels of a side of the square
MIN_STD = 1e-30  # a smaller one is 0 as float32
# The limits of image files, as in raycap. Resizing takes 16 bytes for each pixel of a side, and Pillow needs twice as
# much memory per pixel of WebP. A JPEG file is decoded once per scan, and 200 bytes can be a scan of all pixels.
FILE_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF")
MAX_IMAGE_BYTES, MAX_PIXELS, MAX_IMAGE_SIDE, MAX_WEBP_SHARE = 256 * 2**20, 100_000_000, 2**20, 0.5
SCAN, MAX_SCANS, BYTES_PER_FURTHER_SCAN = b"\xff\xda", 100, 10_000
MAX_PPM_HEADER, TILE_WIDTH, TILE_LENGTH = 2**16, 322, 323
MAX_ASPECT_RATIO = 16  # only a stripe in the middle of a longer image is scaled, if it is cropped afterwards
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # of Pillow, with more than 8 bits
STRIP_PIXELS = 2**20  # that are converted at a time


@dataclass(frozen=True)
class Transform:
    """The image transform: resizing with antialiasing, cropping to the square in the middle, and normalization."""

    image_size: int
    scaled_side: int
    keep_aspect: bool
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def parse(cls, values: object, name: str) -> Transform:
        """The transform in captioner.json. Raises CaptionerError for values that no transform has."""
        read = Values(values, name)
        size = read.number("image_size", 1, MAX_SIZE)
        statistics = [read[key] for key in ("mean", "std")]
        for key, each in zip(("mean", "std"), statistics, strict=True):
            is_valid = isinstance(each, list) and len(each) == 3 and all(map(is_number, each))
            if not is_valid or not all(x > MIN_STD or key == "mean" for x in each):
                raise CaptionerError(f"{name}.{key} is {each!r:.80}; expected 3 numbers")
        if read["interpolation"] not in INTERPOLATIONS:
            raise CaptionerError(f"{name}.interpolation is {read['interpolation']!r:.80}; none of {INTERPOLATIONS}")
        side, keep_aspect = read.number("scaled_side", size, 2 * size), read.flag("keep_aspect")
        return cls(size, side, keep_aspect, read.text("interpolation"), *map(tuple, statistics))

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Normalized pixels (3, H, W) float32 of an RGB image."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        pixels = (self.resize(image).astype(np.float32) / np.float32(255.0) - mean) / std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def resize(self, image: Image.Image) -> np.ndarray:
        """Pixels (H, W, 3) uint8 of the square."""
        width = height = side = self.scaled_side
        if self.keep_aspect:
            image = _without_far_ends(image)
            shorter, longer = sorted(image.size)
            scaled = side * longer // shorter
            width, height = (side, scaled) if image.width <= image.height else (scaled, side)
        resized = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        if (width, height) != (self.image_size, self.image_size):
            left, top = (round((length - self.image_size) / 2) for length in (width, height))
            resized = resized.crop((left, top, left + self.image_size, top + self.image_size))
        return np.asarray(resized)


def _without_far_ends(image: Image.Image) -> Image.Image:
    longest = MAX_ASPECT_RATIO * min(image.size)
    if max(image.size) <= longest:
        return image
    left, top = (max(0, length - longest) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top))


def load_image(source: ImageSource) -> Image.Image:
    """The RGB image, rotated as its EXIF data demand, with transparent pixels blended with white.

    source: a path, the content of a file, Pillow's image, or an array (H, W) or (H, W, 3) of uint8. Raises
    CaptionerError for an image that is too large, and for anything else that is no image.
    """
    try:
        with warnings.catch_warnings():  # of damaged metadata, and of large images, which have a limit
            warnings.simplefilter("ignore")
            image = _open_image(source)
            _check_size(image)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file can raise nearly any type
        problem = f"it cannot be decoded: {' '.join(str(error).split())[:200]}"
        if isinstance(error, CaptionerError):
            problem = str(error)
        elif isinstance(error, Image.UnidentifiedImageError):
            problem = "it is not an image in a known format"
        name = source if isinstance(source, str | Path) else "an image"
        raise CaptionerError(f"{name}: {problem}") from error


def _open_image(source: ImageSource) -> Image.Image:
    """The image, not decoded yet if it is a file."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.shape[2:] not in ((), (3,)) or source.ndim < 2:
            raise CaptionerError(f"it is an array of {source.dtype} {source.shape}; expected uint8 (H, W) or (H, W, 3)")
        return Image.fromarray(source)
    data = source if isinstance(source, bytes) else read_file(Path(source), MAX_IMAGE_BYTES)
    if data.startswith(b"P"):
        Image.open(io.BytesIO(data[:MAX_PPM_HEADER]), formats=("PPM",))  # raises an error if the header is longer
    image = Image.open(io.BytesIO(data), formats=FILE_FORMATS)
    if isinstance(image, JpegImageFile) and data.count(SCAN) > MAX_SCANS + len(data) // BYTES_PER_FURTHER_SCAN:
        raise CaptionerError(f"it is a JPEG file of {data.count(SCAN)} scans, which would take long to decode")
    return image


def _check_size(image: Image.Image) -> None:
    """Raises CaptionerError for an image, or a tile of a TIFF file, with too many pixels or too long a side."""
    sizes = [image.size]
    if isinstance(image, TiffImageFile):  # a tile, which may be larger than the image, is decoded as a whole
        sizes.append((int(image.tag_v2.get(TILE_WIDTH, 1)), int(image.tag_v2.get(TILE_LENGTH, 1))))
    limit = int(MAX_PIXELS * (MAX_WEBP_SHARE if image.format == "WEBP" else 1))
    for width, height in sizes:
        if width * height > limit or max(width, height) > MAX_IMAGE_SIDE:
            raise CaptionerError(
                f"it has {width} x {height} pixels; the limit is {limit}, and {MAX_IMAGE_SIDE} for a side"
            )


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any Pillow mode as RGB, converted in strips, because a conversion makes several copies."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.convert("RGB")
    height = max(1, STRIP_PIXELS // image.width)
    boxes = [(0, top, image.width, min(top + height, image.height)) for top in range(0, image.height, height)]
    white = 255.0
    if image.mode in DEEP_MODES and np.max([np.asarray(image.crop(box)).max() for box in boxes]) > 255:
        white = 65535.0
    rgb = Image.new("RGB", image.size)
    for box in boxes:
        rgb.paste(_strip_to_rgb(image.crop(box), white), box)
    return rgb


def _strip_to_rgb(strip: Image.Image, white: float) -> Image.Image:
    if strip.mode in DEEP_MODES:  # scaled to 8 bits; Pillow's conversion would clip the values at 255
        values = np.asarray(strip).astype(np.float64)
        strip = Image.fromarray(np.clip(values * (255.0 / white) + 0.5, 0, 255).astype(np.uint8))
    if strip.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in strip.info:
        layer = strip.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer).convert("RGB")
    return strip.convert("RGB")
