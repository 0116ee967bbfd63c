"""Checks names that strangers wrote, such as object keys that become local paths, and formats texts for messages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from raycap.pipeline.errors import UserError

MAX_QUOTED = 200
_PLACE = re.compile(r"\A(tar|parquet):[\d+]+:")  # the beginning of an image's URI, if it is in an archive or table
MAX_ERROR = 500


def relative_name(name: str, source: str) -> str:
    """Returns `name` unchanged if it is a plain relative path, which cannot lead out of its folder.

    Raises UserError for an absolute path, for "..", ".", an empty part, a backslash, control characters, and text that
    is not UTF-8. source: where the name was found, for the message.
    """
    parts = name.split("/")
    leads_out = PurePosixPath(name).is_absolute() or any(part in ("", ".", "..") for part in parts)
    if leads_out or "\\" in name or not name.isprintable():
        raise UserError(f"{source}: the name {printable(name)!r} is not a plain relative path; remove or rename it")
    return name


def plain_name(name: str) -> str:
    """A path with slashes and composed letters, to compare names that Windows or macOS wrote."""
    return name if name.isascii() and "\\" not in name else unicodedata.normalize("NFC", name.replace("\\", "/"))


def expanded_path(path: Path | str) -> Path:
    """The path with the home folder in place of `~` or `~user` at its start. Raises UserError if there is no such user.

    Only options and environment variables need this check, because the texts of a configuration are checked when it is
    read.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{shown(path)} begins with ~ and names no user's home folder; give another path") from error


def printable(text: str) -> str:
    """Escapes the characters of `text` that are not printable, so that the text cannot control a terminal.

    Line ends, right-to-left marks and overrides count as not printable.
    """
    if text.isprintable():  # true for most texts, and faster than the loop
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_line(line: str) -> None:
    """Prints a line with control characters escaped, because names that strangers wrote may contain them."""
    print(printable(line))


def one_line(error: BaseException) -> str:
    """The text of an error on one line of at most MAX_ERROR characters. If the text is empty, the type of the error."""
    return printable(" ".join(str(error).split()))[:MAX_ERROR] or type(error).__name__


def quoted(value: object, clean: Callable[[str], str] = str) -> str:
    """A value as an error message shows it: on one line, in at most MAX_QUOTED characters.

    clean: a function that removes secrets. `quoted` calls it before it shortens the text, because half of a secret
    would not be recognized.
    """
    try:
        text = clean(printable(repr(value)))
    except (ValueError, RecursionError):  # from `repr`: an integer has too many digits, or lists are nested too deeply
        text = f"a very long {type(value).__name__}"
    if len(text) <= MAX_QUOTED:
        return text
    half = MAX_QUOTED // 2 - 20
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


def shown(name: object) -> str:
    """A name as an error message shows it: unchanged, or as in `quoted` if it is long or not printable.

    An image in an archive or table is shown as FILE/NAME, without its place in the file (`data/images.py`).
    """
    text = _PLACE.sub("", str(name), count=1)
    return text if text.isprintable() and len(text) <= MAX_QUOTED else quoted(text)


def shorten(ids: Iterable[object], limit: int = 10) -> str:
    """A text for a message with the first `limit` ids and the number of the other ids."""
    names = [shown(image) for image in ids]
    first = ", ".join(names[:limit])
    return first if len(names) <= limit else f"{first} and {len(names) - limit:,} more"
