"""Caption files: COCO annotations, Karpathy files and COCO result files, plain or gzipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycap.pipeline.data.formats.source import MAX_CAPTION
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, relative_name, shorten
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.untrusted.documents import gunzip, kind_of, parse_json, read_document

ImageId = int | str
N_BEST = "n-best-{}.jsonl"  # file with several captions per image; {} is the split
_GZIP_START = b"\x1f\x8b"  # the first two bytes of every gzip file


def read_json(path: Path) -> Any:
    """The parsed content of a JSON file, plain or gzipped, whatever its ending. Raises UserError."""
    if not path.is_file():
        raise UserError(f"file {path} does not exist; give a JSON file, gzipped or not")
    try:
        data = read_document(path)
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error}") from error
    return parse_json(gunzip(data, str(path)) if data.startswith(_GZIP_START) else data, str(path))


def read_references(path: Path, split: str | None = None) -> dict[ImageId, list[str]]:
    """{image id: raw captions} of a COCO or Karpathy file, in file order. Images without captions are left out.

    split: the split to read from a Karpathy file. If it is None, all splits are read. In a Karpathy file the cocoid is
    an image's id, or the imgid if some image has no cocoid. Raises UserError for a file without captions or without
    this split, such as COCO annotations, which have no splits.
    """
    data = read_json(path)
    content = data if isinstance(data, dict) else {}
    images, annotations = content.get("images"), content.get("annotations")
    if isinstance(annotations, list):
        if split is not None:
            raise UserError(f"{path} holds COCO annotations, which have no splits; give the images' Karpathy file")
        references = _read_coco(path, images if isinstance(images, list) else [], annotations)
    elif isinstance(images, list) and images and isinstance(images[0], dict) and "sentences" in images[0]:
        references = _read_karpathy(path, images, split)
    else:
        content_name = f"an object with {shorten(map(quoted, content))}" if content else type(data).__name__
        expected = "COCO's 'annotations' or Karpathy's 'images' with 'sentences'"
        raise UserError(f"{path} holds no reference captions: expected {expected}, found {content_name}")
    if not any(references.values()):
        raise UserError(f"{path} holds no reference captions: its lists are empty; give a file with captions")
    return {image: captions for image, captions in references.items() if captions}


def read_file_names(path: Path) -> dict[ImageId, str]:
    """{image id: file name} from COCO annotations or a Karpathy file. Images without a file name are left out.

    The names are relative to the folder of images. Raises UserError for a name that leads out of this folder.
    """
    data = read_json(path)
    images = data.get("images") if isinstance(data, dict) else None
    names: dict[ImageId, str] = {}
    for number, image in enumerate(images if isinstance(images, list) else []):
        location, values = f"{path}: images[{number}]", image if isinstance(image, dict) else {}
        parts = [values.get(key) for key in ("filepath", "filename", "file_name")]
        name = "/".join(part for part in parts if isinstance(part, str) and part not in ("", "."))
        if name:
            id_key = next((key for key in ("id", "cocoid", "imgid") if key in values), "id")
            names[_id(image, id_key, location)] = relative_name(name, location)
    return names


def _read_coco(path: Path, images: list[Any], annotations: list[Any]) -> dict[ImageId, list[str]]:
    """{image id: raw captions} from the two lists of a COCO file. An image without captions has an empty list."""
    ids = [_id(image, "id", f"{path}: images[{number}]") for number, image in enumerate(images)]
    references: dict[ImageId, list[str]] = {image_id: [] for image_id in ids}
    for number, annotation in enumerate(annotations):
        location = f"{path}: annotations[{number}]"
        captions = references.setdefault(_id(annotation, "image_id", location), [])
        captions.append(_caption(annotation, "caption", location))
    return references


def _read_karpathy(path: Path, images: list[Any], split: str | None) -> dict[ImageId, list[str]]:
    """{image id: raw captions} from the list of a Karpathy file. If the split is None, all splits are read."""
    splits = Counter(str(image.get("split")) for image in images if isinstance(image, dict))
    if split is not None and split not in splits:
        available = shorten(f"{name} ({count} images)" for name, count in splits.items())
        raise UserError(f"{path} has no images in split {split!r}; it has {available}")
    id_key = "cocoid" if all(isinstance(image, dict) and "cocoid" in image for image in images) else "imgid"
    references: dict[ImageId, list[str]] = {}
    for number, image in enumerate(images):
        location = f"{path}: images[{number}]"
        image_id = _id(image, id_key, location)
        if image_id in references:
            raise UserError(f"{location} repeats {id_key} {quoted(image_id)}; every image must occur once")
        if split is not None and image.get("split") != split:
            continue
        sentences = image.get("sentences")
        if not isinstance(sentences, list):
            raise UserError(f"{location} has no list 'sentences'; give a file in Karpathy's layout")
        references[image_id] = [_caption(sentence, "raw", location) for sentence in sentences]
    return references


def write_predictions(path: StoragePath | Path, captions: Mapping[int, str]) -> None:
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
        rows.append((_id(row, "image_id", location), _caption(row, "caption", location)))
    counts = Counter(image for image, _ in rows)
    repeated = [image for image, count in counts.items() if count > 1]
    if repeated:
        described = f"{len(repeated)} images (ids {shorten(repeated)})"
        raise UserError(f"{path} holds more than one caption for {described}; keep one per image")
    return dict(rows)


def write_n_best(path: StoragePath | Path, captions: Mapping[int, Sequence[Mapping[str, object]]]) -> None:
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
        image = _id(row, "image_id", location)
        if image in captions:
            raise UserError(f"{location} repeats image_id {quoted(image)}; every image must have one line")
        ranked = row.get("n_best")
        if not isinstance(ranked, list):
            raise UserError(f"{location} has no list n_best; give captions as `raycap evaluate` writes them")
        captions[image] = [_caption(entry, "caption", location) for entry in ranked]
    return captions


def _id(row: object, key: str, location: str) -> ImageId:
    """row[key], an integer or text. location: names the row in errors. Raises UserError for any other value or row."""
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"{location} has no {key} that is a number or text: found {quoted(row)}")
    return value


def _caption(row: object, key: str, location: str) -> str:
    """row[key], a text of at most MAX_CAPTION characters. Raises UserError for any other value or row."""
    caption = row.get(key) if isinstance(row, dict) else None
    if not isinstance(caption, str):
        raise UserError(f"{location} has no {key} that is text: found {quoted(row)}")
    if len(caption) > MAX_CAPTION:
        raise UserError(f"{location} has a {key} of {len(caption)} characters; the limit is {MAX_CAPTION}")
    return caption
