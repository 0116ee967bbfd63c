"""Finds the image files that command-line arguments name: files, folders, globs, and s3:// prefixes and globs."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from raycap.pipeline.data.formats.files import IMAGE_ENDINGS, matches
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StorageOptions, join, storage_path


def find_images(arguments: Sequence[str], options: StorageOptions = StorageOptions()) -> list[str]:
    """Paths and URIs of the images that the arguments name, in this order and without repetition.

    A folder or prefix gives all files below it that have an image's ending, sorted. Raises UserError for a missing file
    or folder, and for a folder, prefix or pattern without an image.
    """
    images: dict[str, None] = {}
    for argument in arguments:
        names = _find_remote(argument, options) if argument.startswith("s3://") else _find_local(argument)
        if not names:
            raise UserError(f"{argument}: no image found there; the endings are {', '.join(IMAGE_ENDINGS)}")
        images |= dict.fromkeys(names)
    return list(images)


def _find_local(argument: str) -> list[str]:
    """The images in a folder, a file itself, or the files that match a pattern. Raises UserError if nothing exists."""
    path = Path(argument)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        return [str(file) for file in files if file.suffix.lower() in IMAGE_ENDINGS]
    if path.is_file():
        return [argument]
    if glob.has_magic(argument):
        names = glob.glob(argument, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        return [name for name in sorted(names) if Path(name).is_file()]
    raise UserError(f"{argument}: no such file or folder")


def _find_remote(argument: str, options: StorageOptions) -> list[str]:
    """The URI of an object with an image's ending, those that match a pattern, or those of all images below a prefix.

    In a pattern, * and ? do not match a /, and ** stands for any number of folders, as for local files.
    """
    prefix = storage_path(argument, options)
    prefix.require_answer()
    if glob.has_magic(argument) and not prefix.exists():
        segments = argument.split("/")
        start = next(index for index, segment in enumerate(segments) if glob.has_magic(segment))
        folder, patterns = storage_path("/".join(segments[:start]), options), segments[start:]
        names = sorted(name for name, _ in folder.walk() if matches(name.split("/"), patterns))
        return [join(folder.uri, name) for name in names]
    if Path(argument).suffix.lower() in IMAGE_ENDINGS:
        return [prefix.uri]  # a single object; whoever reads it reports a missing one
    return [join(prefix.uri, name) for name in sorted(prefix.list()) if Path(name).suffix.lower() in IMAGE_ENDINGS]
