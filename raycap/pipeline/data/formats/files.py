"""Annotation files and images below `data.root`: which names count, patterns of names, and reading."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, BinaryIO

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import gunzip, parse_json

IMAGE_ENDINGS = (
    ".apng", ".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".pjp", ".pjpeg", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
OTHER_ENDINGS = (".arw", ".cr2", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".psd", ".svg", ".tga")  # not read
TEXT_ENDINGS = (".txt", ".caption")  # of files with the captions of the image of the same name
UNTYPED_ENDINGS = (".csv", ".tsv", ".txt", ".token", ".caption")  # of tables in which every value is text
MAX_ANNOTATION_BYTES = 2 * 2**30  # limit of a file that is read as a whole; large annotation files have 1 GB
MAX_FILES = 100_000  # files that one pattern may name
_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")


@contextmanager
def errors_named(path: StoragePath) -> Iterator[None]:
    """Turns an OSError of the block into a UserError that names the annotation file."""
    try:
        yield
    except IsADirectoryError as error:
        raise UserError(f"annotation file {path} is a folder; give a file in it, or set data.format to text") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"annotation file {path} does not exist; data.annotations is relative to data.root") from error
    except OSError as error:
        raise UserError(f"annotation file {path} cannot be read: {error}") from error


def read_file(path: StoragePath) -> bytes:
    """The content of an annotation file, decompressed if it is a gzip file. Raises UserError."""
    with errors_named(path):
        data = path.read_bytes(MAX_ANNOTATION_BYTES)
    return gunzip(data, f"annotation file {path}")


@contextmanager
def opened(path: StoragePath) -> Iterator[BinaryIO]:
    """Opens an annotation file that is read in parts. Raises UserError."""
    with errors_named(path), path.open() as file:
        yield file


def read_json(path: StoragePath) -> Any:
    """The content of an annotation file in JSON. Raises UserError."""
    return parse_json(read_file(path), f"annotation file {path}", strict=False)


def is_image(name: str) -> bool:
    """True if a file name ends as that of an image does, and is not hidden."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(IMAGE_ENDINGS) and not base.startswith(".")


def is_hidden(name: str) -> bool:
    """True if a file or a folder above it is hidden."""
    return "/." in f"/{name}" and any(part[:1] == "." and part not in (".", "..") for part in name.split("/"))


def unused_kind(name: str) -> str | None:
    """What an image's file is that no reader uses. None for other files, of which nobody expects that they are used."""
    if is_hidden(name):
        return "hidden images" if name.lower().endswith((*IMAGE_ENDINGS, *OTHER_ENDINGS)) else None
    return "images in formats that are not read" if name.lower().endswith(OTHER_ENDINGS) else None


def find_files(root: StoragePath, pattern: str) -> list[str]:
    """The files below a folder that a pattern names. Raises UserError if there is none.

    {000..009} matches each of these numbers, and {a,b} each of the words. *, ?, [...] and ** have the same meaning as
    in a shell. A pattern without these characters, or the name of an existing file, names one file.
    """
    if not (glob.has_magic(pattern) or _BRACES.search(pattern)) or (root / pattern).exists():
        return [pattern]
    found: list[str] = []
    for each in itertools.islice(_expanded(pattern), MAX_FILES + 1):
        found += matching(root, each) if glob.has_magic(each) else [each]
    if not 0 < len(found) <= MAX_FILES:
        problem = f"names more than {MAX_FILES} files" if found else "matches no file"
        raise UserError(f"data.annotations: {shown(pattern)} {problem} below {root}; correct the pattern")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the pattern with each {..} replaced by one of its values, in all combinations."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, words = match.groups()
    if words is None:
        values: Iterable[str] = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    else:
        values = words.split(",")
    for value in values:
        for rest in _expanded(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{value}{rest}"


def matching(root: StoragePath, pattern: str) -> list[str]:
    """The files below a folder that match a pattern with wildcards, sorted."""
    if not root.is_remote:
        names = glob.glob(pattern, root_dir=root.path, recursive=True)  # noqa: PTH207 (Path.glob refuses some patterns)
        return sorted(name for name in names if (root.path / name).is_file())
    parts = pattern.split("/")
    start = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    folder = "/".join(parts[:start])
    found = (root / folder if folder else root).list()
    return sorted("/".join([*parts[:start], name]) for name in found if matches(name.split("/"), parts[start:]))


def matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """True if the segments of a path match those of a pattern, in which ** stands for any number of segments."""
    if patterns == ["**"]:
        return True
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**":
        return any(matches(names[start:], patterns[1:]) for start in range(len(names)))
    return fnmatchcase(names[0], patterns[0]) and matches(names[1:], patterns[1:])


@cache
def prefix_of(folder: str) -> str:
    """The configuration's path of a folder or archive, with which the names of images in it begin: "" or PATH/."""
    path = folder.rstrip("/") if is_remote(folder) else os.path.normpath(folder)
    return "" if path == "." else f"{path}/"
