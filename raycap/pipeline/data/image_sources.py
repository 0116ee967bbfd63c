"""Finds and loads single images that a command or a program gives, without a data set.

The command line names files, folders, globs, and s3:// prefixes and globs. Programs give paths, URIs, bytes of files,
Pillow's images and arrays.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from raycap.pipeline.data.formats.files import IMAGE_ENDINGS, is_hidden, is_image, matching
from raycap.pipeline.data.formats.rows import Rows
from raycap.pipeline.data.images import UNREADABLE, BadImage, convert_image, decode_image, read_image_file, reason_of
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath, join, storage_path
from raycap.pipeline.storage.s3 import StorageError, StorageOptions, is_remote

ImageSource = str | Path | bytes | bytearray | memoryview | Image.Image | np.ndarray
MAX_PIXELS = 100_000_000  # default limit of width x height; larger images are refused
logger = logging.getLogger(__name__)


def find_images(arguments: Sequence[str], options: StorageOptions = StorageOptions()) -> list[str]:
    """Paths and URIs of the images that the arguments name, in the arguments' order, each once.

    For a folder or prefix, these are all images below it (`is_image`), also behind links to folders, but not in hidden
    folders, sorted. In a pattern, * and ? do not match a /, and ** matches any number of folders. Raises UserError for
    a missing file or folder, and for a folder, prefix or pattern without an image. Logs what is left out of folders.
    """
    images, rows = dict[str, None](), Rows()
    for argument in arguments:
        find = _find_remote if is_remote(argument) else _find_local
        names = find(storage_path(argument, options), argument, rows)
        if not names:
            raise UserError(f"{argument}: no image found there; the endings are {', '.join(IMAGE_ENDINGS)}")
        images |= dict.fromkeys(names)
    if rows.left_out:
        logger.info(f"left out  {'; '.join(rows.left_out)}")
    return list(images)


def _find_local(place: StoragePath, argument: str, rows: Rows) -> list[str]:
    """The images that a local argument names: a file, those in a folder, or the files that match a pattern.

    Raises UserError if there is no such file or folder.
    """
    path = Path(argument)
    if path.is_dir():
        return [str(path / name) for name in _find_below(place, rows)]
    if path.is_file():
        return [argument]
    if glob.has_magic(argument):
        return matching(StoragePath("."), argument)
    raise UserError(f"{argument}: no such file or folder")


def _find_remote(place: StoragePath, argument: str, rows: Rows) -> list[str]:
    """The URIs that an argument on S3 names: an object, the objects that match a pattern, or all images below it."""
    place.require_answer()
    if glob.has_magic(argument) and not place.exists():
        bucket, _, pattern = argument.removeprefix("s3://").partition("/")
        root = storage_path(f"s3://{bucket}", place.options)
        return [join(root.uri, name) for name in matching(root, pattern)]
    if is_image(argument):
        return [place.uri]  # not looked up here, because reading a missing object raises an error anyway
    return [join(place.uri, name) for name in _find_below(place, rows)]


def _find_below(folder: StoragePath, rows: Rows) -> list[str]:
    """The relative names of the images below a folder, sorted by their parts. `rows` counts what is left out."""
    names = sorted(folder.names(rows.leave_out), key=lambda name: name.split("/"))
    images = [name for name in names if is_image(name) and not is_hidden(name)]
    for name in sorted({*names} - {*images}):
        rows.leave_out("hidden files" if is_hidden(name) else "files without the ending of an image", name)
    return images


def load_image(
    source: ImageSource, max_pixels: int = MAX_PIXELS, options: StorageOptions = StorageOptions()
) -> Image.Image:
    """The RGB image of a source, rotated as its EXIF data demand.

    source: a path or s3:// URI, the bytes of an image file, an image of Pillow, or an array (H, W), (H, W, 3) or
    (H, W, 4) uint8. Raises BadImage with the reason for an image that cannot be used, and StorageError for an outage.
    """
    if isinstance(source, str | Path):
        try:
            data = read_image_file(storage_path(source, options))
        except StorageError:
            raise  # because an outage is no fault of the image
        except OSError as error:
            raise BadImage(f"{UNREADABLE}: {reason_of(error)}") from error
        return decode_image(data, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return decode_image(bytes(source), max_pixels)
    if isinstance(source, np.ndarray):
        return convert_image(_from_array(source), max_pixels)
    if isinstance(source, Image.Image):
        return convert_image(source, max_pixels)
    raise BadImage(f"an image of the type {type(source).__name__}; give a path, bytes, a Pillow image or an array")


def _from_array(array: np.ndarray) -> Image.Image:
    """The image of an array (H, W), (H, W, 3) or (H, W, 4) uint8. Raises BadImage for other types and shapes."""
    is_gray, is_color = array.ndim == 2, array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype == np.uint8 and array.size and (is_gray or is_color):
        return Image.fromarray(array)
    raise BadImage(f"an array {array.shape} of {array.dtype}; expected (H, W), (H, W, 3) or (H, W, 4) of uint8 values")
