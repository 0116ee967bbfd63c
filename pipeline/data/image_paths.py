"""Which image files a user means: files, folders, globs and s3:// prefixes."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.storage.path import StorageOptions, StoragePath, join, storage_path

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".png", ".ppm", ".tif", ".tiff", ".webp")


def find_images(arguments: Sequence[str], options: StorageOptions = StorageOptions()) -> list[str]:
    """Paths and URIs in the order given, each once; of folders and prefixes all files with an image's ending, sorted.

    Raises UserError for a file or folder that is not there, and for a folder, prefix or pattern without an image. One
    listing a folder or prefix.
    """
    found: dict[str, None] = {}
    for argument in arguments:
        names = _remote(argument, options) if argument.startswith("s3://") else _local(argument)
        if not names:
            raise UserError(f"{argument}: no image found there; the endings are {', '.join(SUFFIXES)}")
        found |= dict.fromkeys(names)
    return list(found)


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
    here: StoragePath = storage_path(argument, options)
    if Path(argument).suffix.lower() in SUFFIXES:
        return [here.uri]  # one object; whether it is there shows when it is read
    return [join(here.uri, name) for name in sorted(here.list()) if Path(name).suffix.lower() in SUFFIXES]
