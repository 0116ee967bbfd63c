"""Reads what describes a captioner, which may come from a stranger: files with limits, and checked values."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_VOCABULARY_BYTES = 2**26


class CaptionerError(ValueError):
    """A folder, a setting or an image that cannot be used, in one sentence."""


def checked(values: object, name: str, kinds: Mapping[str, type | range]) -> dict[str, Any]:
    """The values of an object of JSON: of a type, or whole numbers in a range. name: of the object, for messages.

    Raises CaptionerError for other values.
    """
    if not isinstance(values, dict):
        raise CaptionerError(f"{name} must be an object of JSON")
    for key, kind in kinds.items():
        value = values.get(key)
        if isinstance(kind, range):
            if type(value) is not int or value not in kind:
                expected = f"a number from {kind.start} to {kind.stop - 1}"
                raise CaptionerError(f"{name}: {key} is {value!r:.80}; expected {expected}")
        elif type(value) is not kind:
            raise CaptionerError(f"{name}: {key} is {value!r:.80}; expected a value of type {kind.__name__}")
    return {key: values[key] for key in kinds}


def checked_ids(ids: Iterable[object], name: str, count: int) -> list[Any]:
    """The ids of tokens of a vocabulary of `count` tokens. Raises CaptionerError for other values."""
    found = list(ids)
    if not all(type(index) is int and 0 <= index < count for index in found):
        raise CaptionerError(f"{name} must be a list of ids below {count}")
    return found


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


def read_json(path: Path, limit: int) -> Any:
    """The value in a JSON file. Raises CaptionerError."""
    data = read_file(path, limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CaptionerError(f"{path}: it is not JSON ({error})") from error


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
    def read(cls, path: Path, special: object) -> Words:
        """The words in vocabulary.json. special: the ids of special tokens in captioner.json. Raises CaptionerError."""
        content = read_json(path, MAX_VOCABULARY_BYTES)
        texts, joining = checked(content, str(path), {"words": list, "joining": str}).values()
        if not all(isinstance(text, str) for text in texts):
            raise CaptionerError(f"{path}: words must be a list of texts")
        without_space = []
        if joining == "scripts":
            listed = checked(content, str(path), {"without_space": list})["without_space"]
            without_space = checked_ids(listed, f"{path}: without_space", len(texts))
        ids = checked(special, "tokens", dict.fromkeys(("sos", "eos", "pad", "unk"), range(len(texts))))
        return cls(texts, joining, frozenset(without_space), **ids)

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
