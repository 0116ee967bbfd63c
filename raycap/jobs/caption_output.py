"""The output of `raycap caption`: JSON lines in a local file, or in the parts of a folder on S3.

S3 cannot add a line to an object, so lines are written in parts: OUT/part-000001.jsonl, OUT/part-000002.jsonl, ...
All parts together have the same lines as a local file. A killed command loses the lines since its last part.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.atomic import write_bytes
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_json

PART_ROWS, PART_S = 10_000, 60.0  # a part is written after this many lines, or after this many seconds
ROW_START = b'{"image": '  # of every line
_PART = re.compile(r"part-(\d+)\.jsonl")

Row = Mapping[str, Any]
Write = Callable[[Row], None]


@dataclass(frozen=True)
class CaptionFile:
    """The output of `raycap caption`: a local file, or a folder on S3."""

    place: StoragePath

    def read_done(self, signature: Row) -> dict[str, bool]:
        """Returns {image: whether it has a caption} for the images that earlier calls have written.

        signature: the settings and weights that determine the captions. Removes an incomplete last line of a local
        file. Raises UserError if a line is not one of this command or has another signature.
        """
        done: dict[str, bool] = {}
        for file in _files(self.place):
            data = file.read_bytes()
            complete = data[: data.rfind(b"\n") + 1]  # without the half line of a killed command
            for number, line in enumerate(complete.splitlines(), 1):
                image, has_caption = _parse(line, signature, f"--out {file}: line {number}")
                done[image] = has_caption
            rest = data[len(complete) :]
            if not (rest.startswith(ROW_START) or ROW_START.startswith(rest)):
                raise UserError(f"--out {file} does not end with a caption of this command; give another name")
            if rest and not file.is_remote:
                write_bytes(file.path, complete)
        return done

    @contextmanager
    def open(self, signature: Row) -> Iterator[Write]:
        """Yields a function that writes the row of an image, with the values of the signature, as a JSON line.

        Values of the signature that are None are left out. A file name that is not UTF-8 contains lone surrogates,
        which are written as JSON escapes.
        """
        given = {key: value for key, value in signature.items() if value is not None}

        def line(row: Row) -> bytes:
            return (json.dumps({**row, **given}, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")

        if self.place.is_remote:
            parts = Parts(self.place)
            try:
                yield lambda row: parts.add(line(row))
            finally:
                parts.flush()
            return
        with self.place.path.open("ab") as file:

            def write(row: Row) -> None:
                file.write(line(row))
                file.flush()  # so that a killed command loses only the image in progress

            yield write


def _files(place: StoragePath) -> list[StoragePath]:
    """The existing files of an output, in order. Raises UserError if a local file cannot be written."""
    if place.is_remote:
        return [place / f"part-{number:06d}.jsonl" for number in _part_numbers(place)]
    check_output_file("--out", place.path)
    return [place] if place.exists() else []


def _parse(line: bytes, signature: Row, name: str) -> tuple[str, bool]:
    """The image of a line, and whether the image has a caption. name: the file and the line's number, for messages.

    Raises UserError if the line is not one of this command or has another signature.
    """
    try:
        row = parse_json(line, name, strict=False)  # strict parsing refuses file names that are not UTF-8
        image, has_caption = row["image"], "error" not in row
        found = {key: row.get(key) for key, value in signature.items() if row.get(key) != value}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name} is not a caption of this command; give another name") from error
    if found:
        expected = {key: signature[key] for key in found}
        raise UserError(f"{name} was written with {quoted(found)}, not {expected}; give another name")
    return image, has_caption


class Parts:
    """Collects lines and writes them in parts to a folder on S3. The numbers of parts continue from existing parts."""

    def __init__(self, folder: StoragePath) -> None:
        self.folder, self.number = folder, max(_part_numbers(folder), default=0)
        self.lines: list[bytes] = []
        self.begin = 0.0  # when the oldest of `lines` was added, in seconds of time.monotonic

    def add(self, line: bytes) -> None:
        """Adds a line. Writes a part after PART_ROWS lines, or if the oldest line is PART_S seconds old."""
        if not self.lines:
            self.begin = time.monotonic()
        self.lines.append(line)
        if len(self.lines) >= PART_ROWS or time.monotonic() - self.begin >= PART_S:
            self.flush()

    def flush(self) -> None:
        """Writes the collected lines as the next part. Raises ConflictError if another process has written it."""
        if self.lines:
            part = self.folder / f"part-{self.number + 1:06d}.jsonl"
            part.write_if(b"".join(self.lines), None)
            self.number, self.lines = self.number + 1, []


def _part_numbers(folder: StoragePath) -> list[int]:
    """The sorted numbers of the parts in a folder on S3."""
    return sorted(int(match[1]) for name, _ in folder.walk() if (match := _PART.fullmatch(name)))
