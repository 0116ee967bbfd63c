"""The output of `raycap caption`: JSON lines in a local file, or in the parts of a folder on S3.

An object on S3 cannot be extended, so that each part is written once: OUT/part-000001.jsonl, OUT/part-000002.jsonl, ...
All parts together hold the same lines as a local file. A killed command loses the lines since its last part.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.atomic import write_bytes
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_json

PART_ROWS, PART_S = 10_000, 60.0  # a part has this many lines, or those of this many seconds
NUM_READERS = 8
_PART = re.compile(r"part-(\d+)\.jsonl")

Row = Mapping[str, Any]
Write = Callable[[Row], None]


@dataclass(frozen=True)
class CaptionFile:
    """A local file or a folder on S3 for captions."""

    place: StoragePath

    def read_done(self, signature: Row) -> dict[str, bool]:
        """Returns {image: whether it has a caption} for the images that earlier calls have written.

        signature: the settings and weights that determine the captions. Every line contains those that are not None.
        Removes an incomplete last line of a local file. Raises UserError if a line has another signature or is no
        caption.
        """
        done: dict[str, bool] = {}
        files = _files(self.place)
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for file, data in zip(files, pool.map(StoragePath.read_bytes, files), strict=True):
                complete = data[: data.rfind(b"\n") + 1]  # a killed command has left its last line incomplete
                for number, line in enumerate(complete.splitlines(), 1):
                    image, has_caption = _parse(line, signature, f"--out {file}: line {number}")
                    done[image] = has_caption
                if complete != data and not file.is_remote:
                    write_bytes(file.path, complete)
        return done

    @contextmanager
    def open(self, signature: Row) -> Iterator[Write]:
        """Yields a function that adds the row of an image as a JSON line, with the values of the signature.

        The line lacks values that are None. A file name that is not UTF-8 contains lone surrogates, which become JSON
        escapes.
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
                file.flush()  # a killed command loses only the image that it was captioning

            yield write


def _files(place: StoragePath) -> list[StoragePath]:
    """The files of an output that exist, in order. Raises UserError for a local file that cannot be written."""
    if place.is_remote:
        return [place / f"part-{number:06d}.jsonl" for number in _part_numbers(place)]
    check_output_file("--out", place.path)
    return [place] if place.exists() else []


def _parse(line: bytes, signature: Row, name: str) -> tuple[str, bool]:
    """The image of a line, and whether it has a caption. name: of the line, for messages. Raises UserError."""
    try:
        row = parse_json(line, "it", strict=False)  # file names may not be UTF-8
        image, has_caption = row["image"], "error" not in row
        differing = [key for key, value in signature.items() if row.get(key) != value]
        found, expected = ({key: each.get(key) for key in differing} for each in (row, signature))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name} is not a caption of this command; give another name") from error
    if differing:
        raise UserError(f"{name} was written with {quoted(found)}, not {expected}; give another name")
    return image, has_caption


class Parts:
    """Writes lines in parts to a folder on S3, after the parts that are there."""

    def __init__(self, folder: StoragePath) -> None:
        self.folder, self.number = folder, max(_part_numbers(folder), default=0)
        self.lines: list[bytes] = []
        self.begin = 0.0  # when the first of the lines was added

    def add(self, line: bytes) -> None:
        """Adds a line, and writes a part if it is due."""
        if not self.lines:
            self.begin = time.monotonic()
        self.lines.append(line)
        if len(self.lines) >= PART_ROWS or time.monotonic() - self.begin >= PART_S:
            self.flush()

    def flush(self) -> None:
        """Writes the lines as the next part. Raises ConflictError if another process has written this part."""
        if self.lines:
            part = self.folder / f"part-{self.number + 1:06d}.jsonl"
            part.write_if(b"".join(self.lines), None)
            self.number, self.lines = self.number + 1, []


def _part_numbers(folder: StoragePath) -> list[int]:
    """The numbers of the parts that a folder on S3 has, in order."""
    return sorted(int(match[1]) for name, _ in folder.walk() if (match := _PART.fullmatch(name)))
