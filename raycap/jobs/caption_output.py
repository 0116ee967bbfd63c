"""The output of `raycap caption`: JSON lines in a local file, or in the parts of a folder on S3.

An object on S3 cannot be extended, so that each part is written once: OUT/part-000001.jsonl, OUT/part-000002.jsonl, ...
All parts together hold the same lines as a local file. A killed command loses the lines since its last part.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from raycap.jobs.named_files import check_output_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.atomic import write_bytes
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.untrusted.documents import parse_json

PART_ROWS, PART_S = 10_000, 60.0  # a part has this many lines, or those of this many seconds
NUM_READERS = 8
_PART = re.compile(r"part-(\d+)\.jsonl")

Row = Mapping[str, Any]
Write = Callable[[Row], None]


def read_done(out: StoragePath, signature: Row) -> dict[str, bool]:
    """Returns {image: whether it has a caption} for the images that earlier calls have written to `out`.

    signature: the settings and weights that determine the captions. Every line contains those that are not None.
    Removes an incomplete last line of a local file. Raises UserError if a line has another signature or is no caption.
    """
    if not out.is_remote:
        check_output_file("--out", out.path)
        return _read_file(out, signature) if out.exists() else {}
    names = sorted(f"part-{number:06d}.jsonl" for number in _part_numbers(out))
    done: dict[str, bool] = {}
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for name, data in zip(names, pool.map(lambda name: (out / name).read_bytes(), names), strict=True):
            done |= _parse(out / name, data.splitlines(), signature)
    return done


def written_precision(out: StoragePath) -> str | None:
    """The precision of the first line that earlier calls have written to `out`; None without one."""
    if out.is_remote:
        numbers = _part_numbers(out)
        data = (out / f"part-{min(numbers):06d}.jsonl").read_bytes() if numbers else b""
    else:
        check_output_file("--out", out.path)
        data = out.read_bytes() if out.exists() else b""
    with suppress(ValueError, AttributeError):  # `read_done` refuses a line that is none of this command
        precision = parse_json(data.partition(b"\n")[0], "it", strict=False).get("precision")
        return precision if precision in ("float32", "bfloat16") else None
    return None


def review_place(out: StoragePath) -> StoragePath:
    """The review file beside an output: NAME.review.jsonl for the file NAME.jsonl, and OUT/review/ on S3."""
    if out.is_remote:
        return out / "review"
    return storage_path(out.path.with_name(f"{out.path.stem}.review{out.path.suffix}"))


@contextmanager
def open_output(out: StoragePath, signature: Row, min_confidence: float | None = None) -> Iterator[Write]:
    """Yields a function that adds the row of an image to `out`, with the signature.

    With `min_confidence`, it adds the captions with less confidence, or none, to `review_place(out)` instead.
    """
    if min_confidence is None:
        with _open_place(out, signature) as write:
            yield write
        return
    with _open_place(out, signature) as write, _open_place(review_place(out), signature) as write_review:
        yield lambda row: (
            write_review if "caption" in row and row.get("confidence", -1.0) < min_confidence else write
        )(row)


@contextmanager
def _open_place(out: StoragePath, signature: Row) -> Iterator[Write]:
    """`open_output` for one place."""
    if out.is_remote:
        parts = Parts(out)
        try:
            yield lambda row: parts.add(_line(row, signature))
        finally:
            parts.flush()
        return
    with out.path.open("ab") as file:

        def write(row: Row) -> None:
            file.write(_line(row, signature))
            file.flush()  # a killed command loses only the image that it was captioning

        yield write


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
    return [int(match[1]) for name, _ in folder.walk() if (match := _PART.fullmatch(name))]


def _line(row: Row, signature: Row) -> bytes:
    """A row as a JSON line, without the values of the signature that are None.

    A file name that is not UTF-8 contains lone surrogates, which become JSON escapes.
    """
    given = {key: value for key, value in signature.items() if value is not None}
    return (json.dumps({**row, **given}, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _read_file(out: StoragePath, signature: Row) -> dict[str, bool]:
    """`read_done` for a local file."""
    data = out.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]  # a killed job has left its last line incomplete
    done = _parse(out, complete.splitlines(), signature)
    if complete != data:
        write_bytes(out.path, complete)
    return done


def _parse(place: StoragePath, lines: Iterable[bytes], signature: Row) -> dict[str, bool]:
    """Returns {image: whether it has a caption} for the lines of a file. Raises UserError."""
    done: dict[str, bool] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, "it", strict=False)  # file names may not be UTF-8
            done[row["image"]] = "error" not in row
            differing = [key for key, value in signature.items() if row.get(key) != value]
            found, expected = ({key: each.get(key) for key in differing} for each in (row, signature))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"--out {place}: line {number} is not a caption of this command; give another name"
            ) from error
        if differing:
            raise UserError(
                f"--out {place}: line {number} was written with {quoted(found)}, not {expected}; give another name"
            )
    return done
