"""Files of predicted captions: COCO result files, plain or gzipped, and n-best files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.data.formats.rows import MAX_CAPTION
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shorten
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.untrusted.documents import gunzip, kind_of, parse_json, read_document

N_BEST = "n-best-{}.jsonl"  # file with several captions per image; {} is the split


def read_json(path: Path) -> Any:
    """The parsed content of a JSON file, plain or gzipped, whatever its ending. Raises UserError."""
    if not path.is_file():
        raise UserError(f"file {path} does not exist; give a JSON file, gzipped or not")
    try:
        data = read_document(path)
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error}") from error
    return parse_json(gunzip(data, str(path)), str(path))


def write_predictions(path: StoragePath | Path, captions: Mapping[ImageId, str]) -> None:
    """Writes captions, given by image id, as a COCO result file: a list of {"image_id", "caption"}."""
    rows = [{"image_id": image, "caption": caption} for image, caption in captions.items()]
    storage_path(path).write_bytes(json.dumps(rows, indent=1, ensure_ascii=False).encode())


def read_predictions(path: Path) -> dict[ImageId, str]:
    """{image id: raw caption} from a COCO result file. Raises UserError."""
    data = read_json(path)
    if not isinstance(data, list) or not data:
        content_name = "an empty list" if data == [] else kind_of(data)
        expected = "a list of objects with image_id and caption"
        raise UserError(f"{path} is no result file: expected {expected}, found {content_name}")
    rows = []
    for number, row in enumerate(data):
        location = f"{path}: entry {number}"
        rows.append((_id(row, location), _caption(row, location)))
    counts = Counter(image for image, _ in rows)
    repeated = [image for image, count in counts.items() if count > 1]
    if repeated:
        described = f"{len(repeated)} images (ids {shorten(repeated)})"
        raise UserError(f"{path} holds more than one caption for {described}; keep one per image")
    return dict(rows)


def write_n_best(path: StoragePath | Path, captions: Mapping[ImageId, Sequence[Mapping[str, object]]]) -> None:
    """Writes several captions per image as JSON lines {"image_id", "n_best": [{"caption", ...}, ...]}."""
    rows = [{"image_id": image, "n_best": ranked} for image, ranked in captions.items()]
    storage_path(path).write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def read_n_best(path: Path) -> dict[ImageId, list[str]]:
    """{image id: raw captions} from a file that `write_n_best` wrote. Raises UserError."""
    try:
        lines = read_document(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}; give a file of JSON lines") from error
    captions: dict[ImageId, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        location = f"{path}: line {number}"
        row = parse_json(line, location)
        image = _id(row, location)
        if image in captions:
            raise UserError(f"{location} repeats image_id {quoted(image)}; every image must have one line")
        ranked = row.get("n_best")
        if not isinstance(ranked, list):
            raise UserError(f"{location} has no list n_best; give captions as `raycap evaluate` writes them")
        captions[image] = [_caption(entry, location) for entry in ranked]
    return captions


def _id(row: object, location: str) -> ImageId:
    """row["image_id"], an integer or text. location: names the row in errors. Raises UserError for any other row."""
    value = row.get("image_id") if isinstance(row, dict) else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"{location} has no image_id that is a number or text: found {quoted(row)}")
    return value


def _caption(row: object, location: str) -> str:
    """row["caption"], a text of at most MAX_CAPTION characters. Raises UserError for any other value or row."""
    caption = row.get("caption") if isinstance(row, dict) else None
    if not isinstance(caption, str):
        raise UserError(f"{location} has no caption that is text: found {quoted(row)}")
    if len(caption) > MAX_CAPTION:
        raise UserError(f"{location} has a caption of {len(caption)} characters; the limit is {MAX_CAPTION}")
    return caption
