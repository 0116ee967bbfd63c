"""Reads the JSON files and graphs of a captioner, which may come from a stranger: with limits, and checked values."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

MAX_NUMBER = 1e30


class CaptionerError(ValueError):
    """A folder, a setting or an image that cannot be used, in one sentence."""


class Values:
    """An object of a JSON file, whose values are checked when they are read. name: of the object, for messages."""

    def __init__(self, values: object, name: str) -> None:
        if not isinstance(values, dict):
            raise CaptionerError(f"{name} must be an object of JSON")
        self.values, self.name = values, name

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CaptionerError(f"{self.name} lacks {key}")
        return self.values[key]

    def number(self, key: str, least: int, most: int) -> int:
        if type(self[key]) is not int or not least <= self[key] <= most:
            raise CaptionerError(f"{self.name}: {key} is {self[key]!r:.80}; expected a number from {least} to {most}")
        return int(self[key])

    def flag(self, key: str) -> bool:
        if not isinstance(self[key], bool):
            raise CaptionerError(f"{self.name}: {key} is {self[key]!r:.80}; expected true or false")
        return bool(self[key])

    def text(self, key: str) -> str:
        if not isinstance(self[key], str):
            raise CaptionerError(f"{self.name}: {key} is {self[key]!r:.80}; expected text")
        return str(self[key])

    def ids(self, key: str, count: int) -> list[int]:
        ids = self[key]
        if not isinstance(ids, list) or not all(type(index) is int and 0 <= index < count for index in ids):
            raise CaptionerError(f"{self.name}: {key} must be a list of ids below {count}")
        return ids


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number, also as float32."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises CaptionerError without the name of the file."""
    try:
        _require_file(path)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CaptionerError(f"it cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise CaptionerError(f"it has more than {limit} bytes")
    return data


def _require_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
        raise CaptionerError("it is not a file")


def read_json(path: Path, limit: int) -> Any:
    """The value in a file. Raises CaptionerError."""
    try:
        return json.loads(read_file(path, limit))
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, CaptionerError) else f"it is not JSON ({error})"
        raise CaptionerError(f"{path}: {problem}") from error


def check_digest(path: Path, sha256: str) -> None:
    """Raises CaptionerError for a file that is missing, or that has another SHA-256."""
    try:
        _require_file(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CaptionerError(f"{path} cannot be read: {error.strerror or error}") from error
    except CaptionerError as error:
        raise CaptionerError(f"{path}: {error}") from error
    if digest != sha256:
        raise CaptionerError(
            f"{path} is damaged or changed: captioner.json has another SHA-256; export the model again"
        )
