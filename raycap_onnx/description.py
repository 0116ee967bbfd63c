"""Reads what describes a captioner, which may come from a stranger: files with limits, and checked values."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MAX_VOCABULARY_BYTES = 2**26
T = TypeVar("T")


class CaptionerError(ValueError):
    """A folder, a setting or an image that cannot be used, in one sentence."""


class Values:
    """An object of a JSON file, whose values are checked when they are read. name: of the object, for messages."""

    def __init__(self, values: object, name: str) -> None:
        if not isinstance(values, dict):
            raise CaptionerError(f"{name} must be an object of JSON")
        self.values, self.name = values, name

    def get(self, key: str, kind: type[T]) -> T:
        """The value of a key. Raises CaptionerError unless it has this type."""
        value = self.values.get(key)
        if type(value) is not kind:
            raise CaptionerError(f"{self.name}: {key} is {value!r:.80}; expected a value of type {kind.__name__}")
        return value

    def number(self, key: str, least: int, most: int) -> int:
        value = self.get(key, int)
        if not least <= value <= most:
            raise CaptionerError(f"{self.name}: {key} is {value!r:.80}; expected a number from {least} to {most}")
        return value

    def ids(self, key: str, count: int) -> list[int]:
        ids = self.get(key, list)
        if not all(type(index) is int and 0 <= index < count for index in ids):
            raise CaptionerError(f"{self.name}: {key} must be a list of ids below {count}")
        return ids


def is_number(value: Any) -> bool:
    """True for a finite number, also as float32."""
    return type(value) in (int, float) and abs(value) < 1e30


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises CaptionerError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise CaptionerError(f"{path}: it is not a file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CaptionerError(f"{path}: it cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise CaptionerError(f"{path}: it has more than {limit} bytes")
    return data


def read_json(path: Path, limit: int) -> Values:
    """The object in a file. Raises CaptionerError."""
    data = read_file(path, limit)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CaptionerError(f"{path}: it is not JSON ({error})") from error
    return Values(parsed, str(path))


def check_digest(path: Path, sha256: str) -> None:
    """Raises CaptionerError for a file that is missing, or that has another SHA-256."""
    if not path.is_file():
        raise CaptionerError(f"{path} is missing or no file; export the model again")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise CaptionerError(f"{path} is damaged: captioner.json has another SHA-256; export the model again")


@dataclass(frozen=True)
class Words:
    """The text of each token, how texts are joined, and the ids of special tokens."""

    texts: list[str]
    joining: str
    without_space: frozenset[int]
    sos: int
    eos: int
    pad: int
    unk: int

    @classmethod
    def read(cls, path: Path, special: Values) -> Words:
        read = read_json(path, MAX_VOCABULARY_BYTES)
        texts, joining = read.get("words", list), read.get("joining", str)
        if not all(isinstance(text, str) for text in texts):
            raise CaptionerError(f"{path}: words must be a list of texts")
        glued = read.ids("without_space", len(texts)) if joining == "scripts" else []
        ids = {key: special.number(key, 0, len(texts) - 1) for key in ("sos", "eos", "pad", "unk")}
        return cls(texts, joining, frozenset(glued), **ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The caption's text, without special tokens except UNK."""
        ids = [index for index in ids if index not in (self.sos, self.eos, self.pad)]
        texts = [self.texts[index] for index in ids]
        if self.joining == "spaces":
            return " ".join(texts)
        if self.joining == "bytes":  # bytes that are no valid text are left out
            decoder = codecs.getincrementaldecoder("utf-8")("ignore")
            parts = [decoder.decode(text.encode("latin-1", "ignore")) for text in texts]
            return "".join([*(part.lstrip() for part in parts[:1]), *parts[1:]])
        pairs = zip(ids, texts, [-1, *ids], strict=False)
        glued = self.without_space
        return "".join(
            text if index in glued or before in glued or before < 0 else f" {text}" for index, text, before in pairs
        )
