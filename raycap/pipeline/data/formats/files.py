"""Opens annotation files, and finds those that a pattern such as `shard-{000..009}.tar` names."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import gunzip, parse_json

IMAGE_ENDINGS = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_ANNOTATION_BYTES = 2 * 2**30  # of a file that is read as a whole; annotation files have up to 1 GB
MAX_FILES = 100_000  # that one pattern names
_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")


@contextmanager
def errors_named(path: StoragePath) -> Iterator[None]:
    """Raises UserError for a file that is missing or cannot be read."""
    try:
        yield
    except IsADirectoryError as error:
        raise UserError(f"annotation file {path} is a folder; give a file in it, or set data.format to text") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"annotation file {path} does not exist; data.annotations is relative to data.root") from error
    except OSError as error:
        raise UserError(f"annotation file {path} cannot be read: {error}") from error


def read_file(path: StoragePath) -> bytes:
    """The content of an annotation file, decompressed if its name ends in .gz. Raises UserError."""
    with errors_named(path):
        data = path.read_bytes(MAX_ANNOTATION_BYTES)
    return gunzip(data, f"annotation file {path}") if path.name.endswith(".gz") else data


@contextmanager
def opened(path: StoragePath) -> Iterator[BinaryIO]:
    """An annotation file of any size, which is read in parts. Raises UserError."""
    with errors_named(path), path.open() as file:
        yield file


def read_json(path: StoragePath) -> Any:
    """The content of an annotation file in JSON. Raises UserError."""
    # the readers report the place of text that is not valid
    return parse_json(read_file(path), f"annotation file {path}", strict=False)


def is_image(name: str) -> bool:
    """Whether a file has an image's ending and is not hidden."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(IMAGE_ENDINGS) and not base.startswith(".")


def find_files(root: StoragePath, pattern: str) -> list[str]:
    """The files below a folder that a pattern names, sorted where it has wildcards. Raises UserError without any.

    {000..009} stands for these numbers, {a,b} for each of the words, and *, ?, [...] and ** for what they mean in a
    shell. A name without these characters, or of a file that exists, stands for itself.
    """
    if not (glob.has_magic(pattern) or _BRACES.search(pattern)) or (root / pattern).exists():
        return [pattern]
    names = list(itertools.islice(_expanded(pattern), MAX_FILES + 1))
    found = [name for each in names for name in (_matching(root, each) if glob.has_magic(each) else [each])]
    if not 0 < len(found) <= MAX_FILES:
        problem = f"names more than {MAX_FILES} files" if found else "matches no file"
        raise UserError(f"data.annotations: {shown(pattern)} {problem} below {root}; correct the pattern")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    """The patterns in which each {..} is replaced by one of its values."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, words = match.groups()
    numbers = range(int(first), int(last) + 1) if words is None else ()
    for value in (str(number).zfill(len(first)) for number in numbers) if words is None else words.split(","):
        for rest in _expanded(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{value}{rest}"


def _matching(root: StoragePath, pattern: str) -> list[str]:
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
    """Whether the segments of a path match the segments of a pattern, in which ** stands for any number of them."""
    if patterns == ["**"]:
        return True
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**":
        return any(matches(names[start:], patterns[1:]) for start in range(len(names)))
    return fnmatchcase(names[0], patterns[0]) and matches(names[1:], patterns[1:])
