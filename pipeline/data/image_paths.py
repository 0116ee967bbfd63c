"""Image files from command-line arguments: files, folders, globs and s3:// prefixes."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.storage.path import StorageOptions, StoragePath, join, storage_path

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".png", ".ppm", ".tif", ".tiff", ".webp")


def find_images(arguments: Sequence[str], options: StorageOptions = StorageOptions()) -> list[str]:
    """Paths and URIs in the given order, each once.

    A folder or prefix stands for all files in it with an image's ending, sorted, from one listing. Raises UserError for
    a missing file or folder, and for a folder, prefix or pattern without an image.
    """
    images: dict[str, None] = {}
    for argument in arguments:
        names = _remote(argument, options) if argument.startswith("s3://") else _local(argument)
        if not names:
            raise UserError(f"{argument}: no image found there; the endings are {', '.join(SUFFIXES)}")
        images |= dict.fromkeys(names)
    return list(images)


def _local(argument: str) -> list[str]:
    path = Path(argument)
    if path.is_dir():
        return [str(each) for each in sorted(path.rglob("*")) if each.suffix.lower() in SUFFIXES and each.is_file()]
    if path.is_file():
        return [argument]
    if glob.has_magic(argument):
        names = glob.glob(argument, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        return [name for name in sorted(names) if Path(name).is_file()]
    raise UserError(f"{argument}: no such file or folder")


def _remote(argument: str, options: StorageOptions) -> list[str]:
    prefix: StoragePath = storage_path(argument, options)
    if Path(argument).suffix.lower() in SUFFIXES:
        return [prefix.uri]  # one object; reading it raises when it is missing
    return [join(prefix.uri, name) for name in sorted(prefix.list()) if Path(name).suffix.lower() in SUFFIXES]
