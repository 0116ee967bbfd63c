"""Annotation files to rows: Karpathy's JSON, COCO's captions_*.json, nocaps, and plain tables. No data set needs code.

A reader gives every caption as it stands (empty ones too) and lists what is wrong with single captions; whoever trains
stops at the first such problem, `raycap check` reports them all. What breaks the file's form is a UserError.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import UserError
from pipeline.storage.path import StoragePath, is_remote, join

TABLES = (".jsonl", ".ndjson", ".csv", ".parquet")
MAX_CAPTION = 10_000  # characters; what is longer is no caption, and is cut so that it cannot fill the memory


@dataclass
class Rows:
    """What a reader found, in columns; `problems` are sentences about single captions."""

    image_id: list[int] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    uri: list[str] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, image_id: int, split: str, uri: str, captions: list[str], what: str) -> None:
        """One image; UserError for what no table or file system can hold."""
        if not -(2**63) <= image_id < 2**63:
            raise UserError(f"{what} is malformed: the image id {image_id} has more than 64 bits")
        if "\0" in uri or not _encodes(uri + split):
            raise UserError(f"{what} is malformed: its file name or split is not text")
        self.image_id.append(image_id)
        self.split.append(split)
        self.uri.append(uri)
        self.captions.append(captions)


@dataclass(frozen=True)
class Source:
    """An annotation file, the folder of its images, and the split of images that nothing else assigns."""

    annotations: StoragePath
    images: StoragePath
    split: str | None
    split_lists: dict[str, str]  # {image name or id: split}


def read_source(source: Source, form: str, rows: Rows) -> None:
    """Adds an annotation file's images to `rows`. UserError naming the file when it has not the form."""
    if form == "auto":
        form = _guess(source.annotations)
    if form == "table":
        _read_table(source, rows)
        return
    data = _read_json(source.annotations)
    if form == "auto":
        form = _guess_json(source.annotations, data)
    {"karpathy": _read_karpathy, "coco": _read_coco, "nocaps": _read_coco}[form](source, data, rows)


def _guess(annotations: StoragePath) -> str:
    name = annotations.name.removesuffix(".gz")
    return "table" if name.endswith(TABLES) else "auto"


def _guess_json(annotations: StoragePath, data: Any) -> str:
    if isinstance(data, dict) and isinstance(data.get("images"), list):
        return "coco" if isinstance(data.get("annotations"), list) else "karpathy"
    raise UserError(
        f"{annotations}: its form is not known; expected Karpathy's or COCO's JSON (an object with a list 'images') or "
        f"a table that ends in {', '.join(TABLES)}"
    )


def _read(annotations: StoragePath) -> bytes:
    try:
        data = annotations.read_bytes()
        return gzip.decompress(data) if annotations.name.endswith(".gz") else data
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(
            f"annotation file {annotations} does not exist; data.annotations is taken relative to data.root"
        ) from error
    except (OSError, EOFError) as error:
        raise UserError(f"annotation file {annotations} cannot be read: {error}") from error


def _read_json(annotations: StoragePath) -> Any:
    try:
        return json.loads(_read(annotations))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{annotations} is not valid JSON: {error}") from error


def _read_karpathy(source: Source, data: Any, rows: Rows) -> None:
    """`images` with filepath, filename, split, sentences (raw), and cocoid or imgid."""
    path = source.annotations
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not in Karpathy layout: expected an object with a list 'images' that is not empty")
    for number, entry in enumerate(entries):
        what = f"{path}: images[{number}]"
        try:
            image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
            raw = [sentence["raw"] for sentence in entry["sentences"]]
            split, filename = source.split_lists.get(entry["filename"], entry["split"]), entry["filename"]
            folder = entry.get("filepath") or "."
            if not all(isinstance(text, str) for text in (split, filename, folder)):
                raise TypeError("a split, filename or filepath is not text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{what} is malformed ({type(error).__name__}: {error})") from error
        captions = _texts(raw, what, rows)
        rows.add(image_id, split, _inside(source.images, f"{folder}/{filename}", what), captions, what)


def _read_coco(source: Source, data: Any, rows: Rows) -> None:
    """`images` with id and file_name, `annotations` with image_id and caption; nocaps's domains are its splits."""
    path = source.annotations
    images, annotations = (data.get(name) if isinstance(data, dict) else None for name in ("images", "annotations"))
    if not isinstance(images, list) or not images or not isinstance(annotations, list):
        raise UserError(f"{path} is not in COCO's layout: expected an object with the lists 'images' and 'annotations'")
    found: dict[int, list[Any]] = {}
    for number, entry in enumerate(annotations):
        try:
            found.setdefault(int(entry["image_id"]), []).append(entry["caption"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: annotations[{number}] is malformed ({type(error).__name__}: {error})") from error
    default = source.split or _split_of_name(path.name)
    for number, entry in enumerate(images):
        what = f"{path}: images[{number}]"
        try:
            image_id, filename = int(entry["id"]), entry["file_name"]
            split = source.split_lists.get(filename) or source.split_lists.get(str(image_id))
            split = split or (entry.get("domain") if source.split is None else None) or default
            if not isinstance(filename, str) or not isinstance(split, str):
                raise TypeError("file_name or domain is not text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{what} is malformed ({type(error).__name__}: {error})") from error
        captions = _texts(found.pop(image_id, []), what, rows)
        rows.add(image_id, split, _inside(source.images, filename, what), captions, what)
    if found:
        raise UserError(f"{path}: {len(found)} image ids of 'annotations' are not in 'images', first {min(found)}")


def _split_of_name(name: str) -> str:
    """captions_val2014.json is val: what COCO's own names say."""
    return next((split for split in ("train", "val", "test") if split in name), "train")


def _read_table(source: Source, rows: Rows) -> None:
    """Columns image, id (else the row's number), captions (a text, a list, or one row a caption), split."""
    path = source.annotations
    places: dict[str, int] = {}
    for number, entry in enumerate(_entries(path)):
        what = f"{path}: row {number + 1}"
        image = entry.get("image")
        if not isinstance(image, str) or not image:
            raise UserError(f"{what} has no text in the column image; the columns are {', '.join(map(str, entry))}")
        captions = _texts(_listed(entry.get("captions", entry.get("caption"))), what, rows)
        if image in places:  # one row a caption
            rows.captions[places[image]].extend(captions)
            continue
        identifier = entry.get("id")
        if identifier is None or identifier == "":
            identifier = len(rows.uri)
        try:
            image_id = int(identifier)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{what}: id {identifier!r} is not a whole number; without the column id rows are numbered"
            ) from error
        listed = source.split_lists and (source.split_lists.get(image) or source.split_lists.get(str(identifier)))
        split = listed or entry.get("split") or source.split or "train"
        uri = image if is_remote(image) else _inside(source.images, image, what)
        places[image] = len(rows.uri)
        rows.add(image_id, str(split), uri, captions, what)
    if not places:
        raise UserError(f"{path} has no rows")


def _entries(path: StoragePath) -> Iterator[dict[str, Any]]:
    name, data = path.name.removesuffix(".gz"), _read(path)
    try:
        if name.endswith(".parquet"):
            for batch in pq.ParquetFile(pa.BufferReader(data)).iter_batches(8192):
                yield from batch.to_pylist()
        elif name.endswith(".csv"):
            yield from csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        else:
            for number, line in enumerate(io.BytesIO(data), 1):
                if line.strip():
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ValueError(f"line {number} is not an object")
                    yield entry
    except (ValueError, csv.Error, pa.ArrowException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read as a table: {error}") from error


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):  # a list in a CSV's cell
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            return parsed
    return value if isinstance(value, list) else [] if value is None else [value]


def _texts(values: list[Any], what: str, rows: Rows) -> list[str]:
    """Captions as text; what is none, or far too long, becomes a problem."""
    texts = []
    for value in values:
        if not isinstance(value, str):
            rows.problems.append(f"{what} is malformed: a caption is not text but {type(value).__name__}")
        elif not _encodes(value):  # a lone surrogate, which JSON can spell
            rows.problems.append(f"{what} is malformed: a caption is not text in any encoding")
        elif len(value) > MAX_CAPTION:
            rows.problems.append(f"{what} is malformed: a caption has {len(value)} characters")
            texts.append(value[:MAX_CAPTION])
        else:
            texts.append(value)
    return texts


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_split_lists(root: StoragePath, lists: dict[str, str]) -> dict[str, str]:
    """{image name and id: split} from files with an image a line, as Karpathy's `karpathy_val_images.txt`."""
    found: dict[str, str] = {}
    for split, name in lists.items():
        path = root / name
        for line in _read(path).decode("utf-8", errors="replace").splitlines():
            words = line.split()
            if not words:
                continue
            filename = words[0].rsplit("/", 1)[-1]
            if found.setdefault(filename, split) != split:
                raise UserError(f"data.split_lists: {filename} is in {found[filename]} and again in {path}")
            if len(words) > 1:
                found.setdefault(words[1], split)
            elif filename.isdigit():
                found[str(int(filename))] = split
    return found


def images_folder(root: StoragePath, images: str) -> StoragePath:
    """The folder that an annotation file's names start from; it may not leave the root unless it is an s3:// prefix."""
    if is_remote(images):
        return StoragePath(images.rstrip("/"), root.options)
    return StoragePath(_inside(root, images, "data.images"), root.options)


def _inside(folder: StoragePath, name: str, what: str) -> str:
    """`folder/name` with '.' and '..' taken out, provided that it does not leave `folder`."""
    if name and name[0] not in "./" and "/." not in name and "//" not in name and not name.endswith("/"):
        return join(folder.uri, name)  # the usual case, a million times
    if folder.is_remote:
        plain = os.path.normpath(name)
        if plain.startswith(("..", "/")):
            raise UserError(f"{what}: {name} lies outside of {folder}; paths may not leave it")
        return folder.uri if plain == "." else join(folder.uri, plain)
    base = os.path.normpath(folder.uri)
    plain = os.path.normpath(os.path.join(base, name))  # noqa: PTH118 (a Path would keep the '..')
    if plain != base and not plain.startswith(base.rstrip("/") + "/"):
        raise UserError(f"{what}: {name} lies outside of {folder}; paths may not leave it")
    return plain
