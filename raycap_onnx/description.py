"""Reads files within limits, checks values, and joins words. Everything that is read may come from a stranger."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class CaptionerError(ValueError):
    """A folder, a setting or an image cannot be used. The message is one sentence."""


def one_line(error: Exception) -> str:
    """The message of an error as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def require_number(value: object, name: str, least: int, most: int) -> None:
    """Raises CaptionerError if a value is not a whole number from `least` to `most`."""
    if type(value) is bool or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise CaptionerError(f"{name} is {value!r:.80}; it must be a whole number from {least} to {most}")


def require_flags(owner: object, *names: str) -> None:
    """Raises CaptionerError if an attribute with one of these names is neither true nor false."""
    for name in names:
        if type(getattr(owner, name)) is not bool:
            raise CaptionerError(f"{name} is {getattr(owner, name)!r:.80}; it must be true or false")


def is_number(value: Any) -> bool:
    """True for a number that is finite as float32."""
    return type(value) in (int, float) and abs(value) < 1e30


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises CaptionerError if it cannot be read or has more than `limit` bytes."""
    try:
        if path.exists() and not path.is_file():  # because opening a named pipe would never return
            raise CaptionerError(f"{path}: it is not a file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CaptionerError(f"{path}: it cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise CaptionerError(f"{path}: it has more than {limit} bytes")
    return data


def read_json(path: Path, limit: int) -> Any:
    """The value in a JSON file. Raises CaptionerError if it cannot be read, is too large, or is not JSON."""
    data = read_file(path, limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CaptionerError(f"{path}: it is not JSON ({error})") from error


@dataclass
class Words:
    """The words of a captioner.

    words: the text of each token. joining: "spaces", "scripts" or "bytes", as `pipeline/serving/export.py` describes.
    sos, eos, pad, unk: ids of special tokens. open_endings: ids of words that need another word after them.
    without_space: ids of tokens without spaces before and after them. Raises CaptionerError for other values.
    """

    words: list[str]
    joining: str
    sos: int
    eos: int
    pad: int
    unk: int
    open_endings: list[int]
    without_space: Collection[int] = ()

    def __post_init__(self) -> None:
        if type(self.words) is not list or not all(isinstance(text, str) for text in self.words):
            raise CaptionerError("words must be a list of texts")
        for index in (self.sos, self.eos, self.pad, self.unk, *self.open_endings, *self.without_space):
            require_number(index, "the id of a token", 0, len(self.words) - 1)
        self.without_space = frozenset(self.without_space)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a caption. UNK is the only special token that appears in it."""
        kept = [index for index in ids if index not in (self.sos, self.eos, self.pad)]
        if self.joining == "spaces":
            return " ".join(self.words[index] for index in kept)
        return self._joined_bytes(kept) if self.joining == "bytes" else self._joined_scripts(kept)

    def _joined_bytes(self, ids: list[int]) -> str:
        """Joins tokens of bytes. Bytes that are not valid UTF-8 are left out, and so are blanks of the first token."""
        parts = [self.words[index].encode("latin-1", "ignore") for index in ids]
        caption, first = (b"".join(each).decode(errors="ignore") for each in (parts, parts[:1]))
        return caption[len(first) - len(first.lstrip()) :]

    def _joined_scripts(self, ids: list[int]) -> str:
        """Joins tokens with a space, except before and after tokens of scripts without spaces."""
        caption = ""
        for place, index in enumerate(ids):
            is_joined = place == 0 or index in self.without_space or ids[place - 1] in self.without_space
            caption += self.words[index] if is_joined else f" {self.words[index]}"
        return caption
