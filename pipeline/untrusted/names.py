"""Names from elsewhere: object keys that become paths of local files, and text that is printed on a terminal."""

from __future__ import annotations

import reprlib
from pathlib import PurePosixPath
from typing import Any

from pipeline.errors import UserError


def relative_name(name: str, source: str) -> str:
    """Returns `name` if it is the plain relative path of a file, so that a file of this name stays in its folder.

    Raises UserError for an absolute path, for "..", ".", an empty part, a backslash, a NUL, other control characters
    and text that is not UTF-8. source: where the name was found, for the message.
    """
    parts = name.split("/")
    is_plain = all(part not in ("", ".", "..") for part in parts) and name == printable(name) and "\\" not in name
    if not is_plain or PurePosixPath(name).is_absolute():
        raise UserError(f"{source}: the name {printable(name)!r} is not a plain relative path; remove or rename it")
    return name


def printable(text: str) -> str:
    """`text` with each character that is not printable as an escape, so that it cannot control a terminal.

    Line ends are escaped as well. Right-to-left marks and overrides count as not printable.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def excerpt(value: Any) -> str:
    """A value from elsewhere for a message: at most some levels and a hundred printable characters of each text."""
    limits = reprlib.Repr()
    limits.maxstring = limits.maxother = 100
    limits.maxdict = limits.maxlist = 10
    return printable(limits.repr(value))
