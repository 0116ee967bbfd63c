"""Images of a data set: where they are, how their bytes are read, and how they are decoded to RGB pixels.

The column `uri` of a data set holds one text per image, an `ImageLocation`:

    /folder/dog.jpg or s3://bucket/dog.jpg
    tar:START+LENGTH+CHARACTERS:/folder/shard.tar/dog.jpg
    parquet:GROUP+ROW+LEAF+CHARACTERS:/folder/part.parquet/dog.jpg

START and LENGTH are the range of the image in the archive, in bytes. GROUP, ROW and LEAF are the numbers of a row
group, of a row in it and of a leaf column. CHARACTERS is the length of the path or URI after the colon. The name of the
image follows for people to read, and may contain anything. Local paths are absolute, so that no path can begin with
"tar:" or "parquet:".

Decoding takes bounded memory, whatever a file contains. This module does not import torch, because Ray's decoding tasks
start faster without it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import re
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from raycap.models.config import Augmentation, Values, content_key_of, seed_of_key
from raycap.models.encoders.transform import ImageTransform, augmented
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.cache import ImageCache, cached_image
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions, is_remote
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile, RowPlace

PARTS = ("tar:", "parquet:")  # a location within an archive or table starts with one of these
MAX_BYTES = 256 * 2**20  # limit of an image file, because it is read into memory as a whole
UNREADABLE = "cannot be read"  # the next extraction tries an image again if its reason starts with this
_TAR = re.compile(r"tar:(\d{1,19})\+(\d{1,19})\+(\d{1,6}):(.*)", re.DOTALL)
_PARQUET = re.compile(r"parquet:(\d{1,9})\+(\d{1,9})\+(\d{1,9})\+(\d{1,6}):(.*)", re.DOTALL)
# EPS is left out, because Pillow starts a program that interprets such a file. JPEG 2000 is left out, because a file of
# 100 bytes can make its decoder take 1.6 kB per pixel. Multi-picture files (MPO) count as JPEG. The common formats come
# first, because Pillow imports all its plugins before it tries the others.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF")
MAX_WEBP_SHARE = 0.5  # fraction of `max_pixels`, because Pillow needs 16 bytes per pixel of WebP, 8 of other formats
MAX_SIDE = 2**20  # pixels, because resizing takes 16 bytes for each pixel of a side
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # Pillow's modes of one channel with more than 8 bits
MAX_UNIT_FLOAT = 2.0  # floats up to here are those of 0 (black) to 1 (white); resizing can give a little more than 1
STRIP_PIXELS = 2**20  # pixels that `_to_rgb` converts at a time
PHOTOMETRIC, TILE_WIDTH, TILE_LENGTH = 262, 322, 323  # tags of a TIFF file
# The scans of a JPEG file are limited, because Pillow decodes all pixels once per scan, and a scan may have only 200
# bytes. Photographs have about 10 scans at most. One in 65,536 pairs of other bytes equals SCAN by chance, so the limit
# grows with the file.
SCAN, MAX_SCANS, BYTES_PER_FURTHER_SCAN = b"\xff\xda", 100, 10_000
MAX_PPM_HEADER = 2**16  # bytes, because Pillow reads the comments of a header byte by byte, at 1 MB per second
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"  # the first bytes of such files
PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")  # of a PNG file


class BadImage(Exception):
    """An image cannot be used. The message is the reason, which the quarantine lists."""


class UnknownFormatError(BadImage):
    """A file is no image, or its format is not in FORMATS."""


class OversizedError(BadImage):
    """An image has too many pixels."""


@dataclass(frozen=True)
class ImageLocation:
    """Where an image is. file: the image file, or the archive or table that contains the image.

    part: the image's (start, length) in an archive, in bytes, or its row in a table. None if the file is the image.
    """

    file: StoragePath
    part: tuple[int, int] | RowPlace | None = None
    name: str = field(default="", compare=False)  # of the image in the archive or table

    @classmethod
    def parse(cls, uri: str, options: StorageOptions = StorageOptions()) -> ImageLocation:
        """The location that a text of the column `uri` describes. Raises ValueError for any other text."""
        if not uri.startswith(PARTS):
            return cls(StoragePath(uri, options))
        match = _TAR.fullmatch(uri) or _PARQUET.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri[:200]!r} is not the location of an image")
        *values, count, path = match.groups()
        file, name = path[: int(count)], path[int(count) + 1 :]
        numbers = list(map(int, values))
        part = RowPlace(*numbers) if len(numbers) == 3 else (numbers[0], numbers[1])
        return cls(StoragePath(file, options), part, name)

    @property
    def uri(self) -> str:
        """The text for the column `uri`, from which `parse` makes an equal location."""
        if self.part is None:
            return self.file.uri
        kind = "parquet" if isinstance(self.part, RowPlace) else "tar"
        return f"{kind}:{'+'.join(map(str, self.part))}+{len(self.file.uri)}:{self.file.uri}/{self.name}"

    def __str__(self) -> str:
        return self.uri

    @property
    def is_remote(self) -> bool:
        return self.file.is_remote

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """The image's bytes. Raises OSError if they cannot be read, are missing, or are more than `max_bytes`."""
        if self.part is None:
            return self.file.read_bytes(max_bytes)
        if isinstance(self.part, RowPlace):
            return self._row_value(self.part, max_bytes)
        start, length = self.part
        if max_bytes is not None and length > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        data = self.file.read_range(start, length) if length else b""
        if len(data) != length:
            raise OSError(errno.EIO, f"{self.file} ends before it; was it replaced?", self.uri)
        return data

    def _row_value(self, place: RowPlace, max_bytes: int | None) -> bytes:
        """The bytes of an image in a Parquet file. Raises OSError if they cannot be read, are missing or too many."""
        try:
            value = _images_of_group(self.file, place)[place.row]
        except (UserError, IndexError) as error:
            raise OSError(errno.EIO, f"not readable: {error}", self.uri) from error
        if not value.is_valid:
            raise OSError(errno.ENODATA, "the row has no bytes", self.uri)
        if max_bytes is not None and len(value.as_buffer()) > max_bytes:
            raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
        data: bytes = value.as_py()
        return data


MAX_GROUPS_BYTES = 256 * 2**20  # limit of the cached row groups; the newest one stays even if it is larger
_GROUPS: OrderedDict[tuple[str, int, int], pa.LargeBinaryArray] = OrderedDict()  # least recently used first
_LOCK = threading.Lock()


def _images_of_group(file: StoragePath, place: RowPlace) -> pa.LargeBinaryArray:
    """The images of a row group, which this process caches. Raises UserError or OSError for a damaged file."""
    key = file.uri, place.group, place.leaf
    with _LOCK:  # threads that need the same column read it once
        if key not in _GROUPS:
            with file.open() as opened:
                _GROUPS[key] = ParquetFile(opened, str(file)).values(place.group, place.leaf)
        _GROUPS.move_to_end(key)
        while len(_GROUPS) > 1 and sum(each.nbytes for each in _GROUPS.values()) > MAX_GROUPS_BYTES:
            _GROUPS.popitem(last=False)
        return _GROUPS[key]


def forget_row_groups() -> None:
    """Empties this process's cache of row groups, because files may have been replaced."""
    with _LOCK:
        _GROUPS.clear()


def is_remote_image(uri: str) -> bool:
    """True if an image is on S3. uri: a text of the column `uri`."""
    return ImageLocation.parse(uri).is_remote if uri.startswith(PARTS) else is_remote(uri)


def read_image_file(path: StoragePath, key: str | None = None, cache: ImageCache | None = None) -> bytes:
    """The bytes of an image file, or of an image in an archive or table.

    path: its URI is the text of an ImageLocation. key: the image's content key, or None if it is unknown. If the key is
    known, an image on S3 is taken from this machine's cache when the cache contains it. Otherwise the image is
    downloaded, and added to `cache` if one is given. Raises OSError for more than MAX_BYTES, and for pipes and devices.
    """
    image = ImageLocation.parse(path.uri, path.options)
    if not key or not image.is_remote:
        return image.read_bytes(MAX_BYTES)
    if cache is not None:
        return cache.read(image, key, MAX_BYTES)
    cached = cached_image(key)
    return image.read_bytes(MAX_BYTES) if cached is None else cached


def reason_of(error: OSError) -> str:
    """The reason why a file cannot be read, without secrets, because the reason is stored."""
    return without_secrets(error.strerror or str(error))


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """The RGB image in a file's bytes, rotated as its EXIF data demand. Transparent pixels are blended with white.

    Raises BadImage for empty, truncated, oversized (width x height above `max_pixels`) or unreadable bytes.
    """
    if not data:
        raise BadImage("empty file")
    with _bad_images():
        try:
            image = _load(data, max_pixels)
        except (BadImage, MemoryError):
            raise
        except Exception:  # Pillow refuses a file with whole pixels if its metadata are damaged or long
            image = _load(_without_metadata(data), max_pixels)
        with suppress(Exception):  # damaged EXIF data count as none
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def convert_image(image: Image.Image, max_pixels: int) -> Image.Image:
    """An RGB copy of a Pillow image, rotated by its EXIF data and blended with white. Raises BadImage."""
    with _bad_images():
        _require_size(image, max_pixels)
        image.load()
        with suppress(Exception):  # damaged EXIF data count as none
            image = ImageOps.exif_transpose(image)
        return _to_rgb(image)


@contextmanager
def _bad_images() -> Iterator[None]:
    """Turns any error of the block into a BadImage, because a damaged image can raise nearly any type."""
    try:
        with warnings.catch_warnings():  # about damaged metadata, and about large images, which `max_pixels` limits
            warnings.simplefilter("ignore")
            yield
    except BadImage:
        raise
    except Image.UnidentifiedImageError as error:
        raise UnknownFormatError("not an image in a known format") from error
    except Image.DecompressionBombError as error:
        raise OversizedError(f"cannot be decoded: {one_line(error)}") from error
    except MemoryError as error:
        raise BadImage("cannot be decoded: it needs too much memory") from error
    except Exception as error:  # a damaged file can raise nearly any type
        raise BadImage(f"cannot be decoded: {one_line(error)}") from error


def _load(data: bytes, max_pixels: int) -> Image.Image:
    """The image in a file's bytes, of any mode. Raises an exception of nearly any type for a damaged file."""
    if data.startswith(b"P"):
        Image.open(io.BytesIO(data[:MAX_PPM_HEADER]), formats=("PPM",))  # raises an error if the header is longer
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    _require_size(image, max_pixels)
    if isinstance(image, JpegImageFile) and data.count(SCAN) > MAX_SCANS + len(data) // BYTES_PER_FURTHER_SCAN:
        raise BadImage(f"a JPEG file of {data.count(SCAN)} scans, which would take long to decode")
    image.load()
    return image


def _without_metadata(data: bytes) -> bytes:
    """A PNG or JPEG file without colour profile, texts and other metadata that pixels do not need.

    EXIF data are kept for the orientation. Bytes of another format are returned as they are.
    """
    form = next((form for form in (PNG, JPEG) if data.startswith(form)), data)
    parts, end = [form], len(form)
    while end < len(data):
        start, head = end, data[end : end + 10]
        if form == PNG:
            end += 12 + int.from_bytes(head[:4])
            is_kept = head[4:8] in PIXEL_CHUNKS
            if head[4:8] == b"eXIf":
                is_kept = zlib.crc32(data[start + 4 : end - 4]) == int.from_bytes(data[end - 4 : end])
        elif head[:1] == b"\xff" and head[:2] != SCAN:
            end += 2 + int.from_bytes(head[2:4])
            is_kept = head[1] < 0xE0 or head[4:] in (b"Exif\0\0", b"Adobe\0")  # Adobe's segment has the colour space
        else:  # the pixels
            end, is_kept = len(data), True
        if is_kept:
            parts.append(data[start:end])
    return b"".join(parts)


def _require_size(image: Image.Image, max_pixels: int) -> None:
    """Raises OversizedError for an image, or a tile of a TIFF file, of more than `max_pixels` or with too long a side.

    The reason ends with `max_pixels`, so that an extraction with another limit knows that it must try the image again.
    """
    if image.format == "WEBP" and image.width * image.height > MAX_WEBP_SHARE * max_pixels:
        share = f"more than {MAX_WEBP_SHARE:.0%}, which a WebP image may have, of {max_pixels}"
        raise OversizedError(f"{image.width} x {image.height} pixels, {share}")
    sizes = [image.size]
    if isinstance(image, TiffImageFile):  # a tile, which may be larger than the image, is decoded as a whole
        sizes.append((int(image.tag_v2.get(TILE_WIDTH, 1)), int(image.tag_v2.get(TILE_LENGTH, 1))))
    for width, height in sizes:
        if width * height > max_pixels:
            raise OversizedError(f"{width} x {height} pixels, more than {max_pixels}")
        if max(width, height) > MAX_SIDE:
            raise OversizedError(f"{width} x {height} pixels, a side of more than {MAX_SIDE}")


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any Pillow mode as RGB.

    The image is converted in strips, because a conversion makes several copies and needs 8 bytes per 16-bit value.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.convert("RGB")
    height = max(1, STRIP_PIXELS // image.width)
    boxes = [(0, top, image.width, min(top + height, image.height)) for top in range(0, image.height, height)]
    black, white = 0.0, 255.0
    if image.mode in DEEP_MODES:
        highest = max(np.nan_to_num(np.asarray(image.crop(box)), posinf=0).max() for box in boxes)
        if image.mode == "F" and highest <= MAX_UNIT_FLOAT:
            white = 1.0
        elif highest > 255:
            white = 65535.0
        if isinstance(image, TiffImageFile) and image.tag_v2.get(PHOTOMETRIC) == 0:
            black, white = white, black  # as Pillow does for at most 8 bits
    rgb = Image.new("RGB", image.size)
    for box in boxes:
        rgb.paste(_strip_to_rgb(image.crop(box), black, white), box)
    return rgb


def _strip_to_rgb(strip: Image.Image, black: float, white: float) -> Image.Image:
    """A strip of an image as RGB. black, white: the values of such pixels if the mode is in DEEP_MODES."""
    if strip.mode in DEEP_MODES:
        # More than 8 bits are scaled to 8 bits, as viewers do; Pillow's conversion would clip them at 255.
        values = np.nan_to_num(np.asarray(strip).astype(np.float64))
        values[values == strip.info.get("transparency")] = white
        scaled = (values - black) * (255.0 / (white - black)) + 0.5
        strip = Image.fromarray(np.clip(scaled, 0, 255).astype(np.uint8))
    if strip.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in strip.info:
        layer = strip.convert("RGBA")
        background = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    return strip.convert("RGB")


def pixels_of(
    image: Image.Image, transform: ImageTransform, augmentation: Augmentation, seed: int | None
) -> np.ndarray:
    """The resized pixels (H, W, 3) uint8 of an RGB image. If a seed is given, the image is first `augmented` by it."""
    return transform.resize(image) if seed is None else augmented(image, augmentation, seed, transform.resize)


def unusable(uris: np.ndarray, keys: np.ndarray, max_pixels: int, options: StorageOptions, threads: int) -> list[str]:
    """Decodes images. Returns for each the reason why it cannot be used, or "". Raises StorageError for an outage.

    keys: the content key of each image, or None if it is unknown. threads: the number of threads for local files.
    """

    def problem_of(uri: str, key: str | None) -> str:
        try:
            decode_image(read_image_file(StoragePath(uri, options), key), max_pixels)
        except StorageError:
            raise
        except (BadImage, OSError) as error:
            return str(error)
        return ""

    return _for_each(problem_of, threads, list(map(str, uris)), keys)


def _for_each(function: Callable[..., Any], threads: int, uris: Sequence[str], *columns: Iterable[object]) -> list[Any]:
    """Calls a function for each image in threads. Returns its results in order.

    Images on S3 get at least 8 threads, because requests mostly wait.
    """
    with ThreadPoolExecutor(max(threads, 8 if any(map(is_remote_image, uris)) else 1)) as pool:
        return list(pool.map(function, uris, *columns))


def decode_batch(
    batch: dict[str, np.ndarray],
    transform: ImageTransform,
    max_pixels: int,
    options: StorageOptions = StorageOptions(),
    augmentation: Augmentation = Augmentation(),
) -> Values:
    """Decodes a batch with the columns key and uri, and adds two columns. Raises StorageError for an outage.

    key: the expected sha256 of the file, or "" if it is unknown. A file with another sha256 counts as unreadable. If it
    is a key of `models.config.Views`, the pixels are those of a random version of the image, by `augmentation`.
    Consecutive rows of one image are decoded once.
    New column pixels: (B, H, W, 3) uint8 of the transform's size, black for an image that cannot be used. New column
    reason: why the image cannot be used, or "".
    """
    side = transform.image_size
    pixels = np.zeros((len(batch["key"]), side, side, 3), np.uint8)
    keys, uris = list(map(str, batch["key"])), list(map(str, batch["uri"]))
    groups = [list(rows) for _, rows in itertools.groupby(range(len(uris)), lambda row: uris[row])]

    def decode(uri: str, rows: list[int]) -> str:
        """Writes the pixels of one image into its rows. Returns the reason why it cannot be used, or ""."""
        expected = content_key_of(keys[rows[0]])  # "" if it is unknown
        try:
            data = read_image_file(StoragePath(uri, options), expected)
            digest = hashlib.sha256(data).hexdigest()
            if expected not in ("", digest):
                return f"{UNREADABLE}: it changed while it was being extracted"
            image = decode_image(data, max_pixels)
            for row in rows:
                pixels[row] = pixels_of(image, transform, augmentation, seed_of_key(keys[row]))
        except BadImage as error:
            return str(error)
        except StorageError:  # an OSError for which the image is not at fault
            raise
        except OSError as error:
            return f"{UNREADABLE}: {reason_of(error)}"
        return ""

    found = _for_each(decode, 1, [uris[rows[0]] for rows in groups], groups)
    reasons = [reason for reason, rows in zip(found, groups, strict=True) for _ in rows]
    return {**batch, "pixels": pixels, "reason": np.array(reasons)}
