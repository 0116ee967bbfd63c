"""Reads annotation files as rows: Karpathy's JSON, COCO's captions_*.json, nocaps, and plain tables.

A reader does not change captions, not even empty ones. It collects the problems of single captions: training stops at
the first problem, and `raycap check` reports all of them. A file that does not have its format raises UserError.
`FORMATS` lists the readers; `data.format` in `pipeline/config/sections.py` must list the same names.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import UserError
from pipeline.scoring.result_files import MAX_CAPTION, shorten
from pipeline.storage.path import StoragePath, is_remote, join
from pipeline.untrusted.documents import gunzip, parquet_rows, parse_json
from pipeline.untrusted.names import quoted

TABLE_ENDINGS = (".jsonl", ".ndjson", ".csv", ".parquet")
TABLE_COLUMNS = ("image", "captions", "caption", "id", "split")
MAX_ANNOTATION_BYTES = 2 * 2**30  # of a file; annotation files have up to 1 GB
MAX_COLUMNS = 1000  # of a CSV file, because every row is filled up to this number
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: JSON can contain it, but no encoding can
_Image = tuple[int, str, tuple[str, ...], list[Any]]  # its id, its split, the parts of its path, its captions


@dataclass
class Rows:
    """The images of annotation files, as one list per column, and `problems`: sentences about single captions."""

    image_id: list[int] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    uri: list[str] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    # with `Source.with_tokens` the file's tokens of each caption, joined with spaces; else empty
    tokens: list[list[str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, image_id: int, split: str, uri: str, captions: list[str], location: str) -> None:
        """Adds an image. Raises UserError for values that a table or file system cannot hold."""
        if not -(2**63) <= image_id < 2**63:
            raise UserError(f"{location} is malformed: the image id {quoted(image_id)} has more than 64 bits")
        if "\0" in uri or _SURROGATE.search(uri + split):
            raise UserError(f"{location} is malformed: its file name or split is not text")
        self.image_id.append(image_id)
        self.split.append(split)
        self.uri.append(uri)
        self.captions.append(captions)


@dataclass(frozen=True)
class Source:
    """An annotation file, the folder of its images, and the split of images for which the files name none."""

    annotations: StoragePath
    images: StoragePath
    split: str | None
    split_lists: dict[str, str]  # {image name or id: split}
    with_tokens: bool = False  # whether to read the tokens of the captions, which only Karpathy's JSON has


def read_source(source: Source, name: str, rows: Rows) -> None:
    """Adds an annotation file's images to `rows`. name: a key of `FORMATS`, or "auto". Raises UserError."""
    path = source.annotations
    is_table = name == "table" or (name == "auto" and path.name.removesuffix(".gz").endswith(TABLE_ENDINGS))
    if is_table:
        _require_tokens(source, False)
        _add_table(source, _entries(path), rows)
        return
    data = _read_json(path)
    if name == "auto":
        if not isinstance(data, dict) or not isinstance(data.get("images"), list):
            expected = "Karpathy's or COCO's JSON (an object with a list 'images')"
            endings = ", ".join(TABLE_ENDINGS)
            raise UserError(f"{path} has an unknown format; expected {expected} or a table that ends in {endings}")
        first = data["images"][0] if data["images"] else None
        is_karpathy = not isinstance(first, dict) or bool({"filename", "sentences"} & first.keys())
        name = "karpathy" if is_karpathy else "coco"
    _require_tokens(source, name == "karpathy")
    FORMATS[name](source, data, rows)


def _require_tokens(source: Source, has_tokens: bool) -> None:
    """Raises UserError if the tokens of captions are needed and the file's format has none."""
    if source.with_tokens and not has_tokens:
        raise UserError(
            f"data.tokenizer is tokens, and {source.annotations} is not in Karpathy's layout, whose sentences have "
            "tokens; set it to expansionnet or spacy"
        )


def _read(path: StoragePath) -> bytes:
    """The content of an annotation file, decompressed if its name ends in .gz. Raises UserError."""
    try:
        data = path.read_bytes(MAX_ANNOTATION_BYTES)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"annotation file {path} does not exist; data.annotations is relative to data.root") from error
    except OSError as error:
        raise UserError(f"annotation file {path} cannot be read: {error}") from error
    return gunzip(data, f"annotation file {path}") if path.name.endswith(".gz") else data


def _read_json(path: StoragePath) -> Any:
    """The content of an annotation file in JSON. Raises UserError."""
    return parse_json(_read(path), f"annotation file {path}", strict=False)  # `_texts` reports their place


def _add_karpathy(source: Source, data: Any, rows: Rows) -> None:
    """Adds the entries of `images`: filepath, filename, split, sentences with raw text, and cocoid or imgid."""
    path = source.annotations
    entries = data.get("images") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not in Karpathy layout: expected an object with a list 'images' that is not empty")

    def parse(entry: dict[str, Any]) -> _Image:
        image_id = int(entry["cocoid"] if "cocoid" in entry else entry["imgid"])
        captions = [sentence["raw"] for sentence in entry["sentences"]]
        split = source.split_lists.get(entry["filename"], entry["split"])
        return image_id, split, (entry.get("filepath") or ".", entry["filename"]), captions

    _add_images(source, entries, parse, rows)
    if source.with_tokens:
        for number, entry in enumerate(entries):
            location = f"{path}: images[{number}]"
            rows.tokens.append([_joined_tokens(sentence.get("tokens"), location) for sentence in entry["sentences"]])


def _joined_tokens(tokens: Any, location: str) -> str:
    """The tokens of a caption joined with spaces. Raises UserError unless they are a list of words."""
    if tokens is None:
        raise UserError(f"{location}: a sentence has no tokens, and data.tokenizer is tokens; set it to spacy")
    is_list = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    text = " ".join(tokens) if is_list else ""
    if not is_list or text.split() != tokens or _SURROGATE.search(text) or len(text) > MAX_CAPTION:
        raise UserError(f"{location} is malformed: the tokens of a sentence are not a list of words")
    return text


def _add_coco(source: Source, data: Any, rows: Rows) -> None:
    """Adds `images` (id, file_name) with `annotations` (image_id, caption). A nocaps image's domain is its split.

    A file without `annotations`, as COCO's image_info_test2014.json, has images without captions.
    """
    path = source.annotations
    images = data.get("images") if isinstance(data, dict) else None
    annotations = data.get("annotations", []) if isinstance(data, dict) else None
    if not isinstance(images, list) or not images or not isinstance(annotations, list):
        raise UserError(
            f"{path} is not in COCO's layout: expected an object with the list 'images', and with the list "
            "'annotations' if the images have captions"
        )
    captions_of: dict[int, list[Any]] = {}
    for number, entry in enumerate(annotations):
        try:
            captions_of.setdefault(int(entry["image_id"]), []).append(entry["caption"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _malformed(f"{path}: annotations[{number}]", error) from error
    # A name like COCO's, for example captions_val2014.json, contains the split.
    split_of_name = next((split for split in ("train", "val", "test") if split in path.name), "train")

    def parse(entry: dict[str, Any]) -> _Image:
        image_id, filename = int(entry["id"]), entry["file_name"]
        split = source.split_lists.get(filename) or source.split_lists.get(str(image_id))
        split = split or source.split or entry.get("domain") or split_of_name
        return image_id, split, (filename,), captions_of.pop(image_id, [])

    _add_images(source, images, parse, rows)
    if captions_of:
        count, first = len(captions_of), min(captions_of)
        raise UserError(f"{path}: {count} image ids of 'annotations' are not in 'images', first {quoted(first)}")


def _add_images(source: Source, entries: list[Any], parse: Callable[[dict[str, Any]], _Image], rows: Rows) -> None:
    """Adds the images of a JSON file. `parse` reads one entry, and may raise any error if the entry is malformed."""
    for number, entry in enumerate(entries):
        location = f"{source.annotations}: images[{number}]"
        try:
            image_id, split, names, captions = parse(entry)
            if not all(isinstance(text, str) for text in (split, *names)):
                raise TypeError("its split, domain or file name is not text")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise _malformed(location, error) from error
        texts = _texts(captions, location, rows)
        rows.add(image_id, split, _inside(source.images, "/".join(names), location), texts, location)


def _malformed(location: str, error: Exception) -> UserError:
    return UserError(f"{location} is malformed ({type(error).__name__}: {error})")


def _add_table(source: Source, entries: Iterator[dict[str, Any]], rows: Rows) -> None:
    """Adds the images of a table with the columns image, captions or caption, and optionally id and split.

    captions: a list, or one text. Rows of the same image are joined. Without an id, an image's id is the number of
    images that were added before it.
    """
    path = source.annotations
    row_of: dict[str, int] = {}
    for number, entry in enumerate(entries):
        location = f"{path}: row {number + 1}"
        image = entry.get("image")
        if not isinstance(image, str) or not image:
            raise UserError(f"{location} has no text in the column image; the columns are {shorten(entry)}")
        captions = _texts(_as_list(entry.get("captions", entry.get("caption"))), location, rows)
        if image in row_of:  # the table has one row per caption
            rows.captions[row_of[image]].extend(captions)
            continue
        identifier = entry.get("id")
        identifier = len(rows.uri) if identifier in (None, "") else identifier
        try:
            image_id = int(identifier)
        except (TypeError, ValueError, OverflowError) as error:
            shown = quoted(identifier)
            message = f"{location}: id {shown} is not a whole number; without a column id, rows are numbered"
            raise UserError(message) from error
        split = source.split_lists.get(image) or source.split_lists.get(str(identifier))
        split = split or entry.get("split") or source.split or "train"
        if not isinstance(split, str | int):
            raise UserError(f"{location}: split {quoted(split)} is not text")
        uri = _inside(source.images, image, location)
        row_of[image] = len(rows.uri)
        rows.add(image_id, str(split), uri, captions, location)
    if not row_of:
        raise UserError(f"{path} has no rows")


def _entries(path: StoragePath) -> Iterator[dict[str, Any]]:
    """The rows of a table by column name."""
    name, data = path.name.removesuffix(".gz"), _read(path)
    try:
        if name.endswith(".parquet"):
            yield from parquet_rows(data, f"annotation file {path}", TABLE_COLUMNS)
        elif name.endswith(".csv"):
            rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
            if len(rows.fieldnames or ()) > MAX_COLUMNS:
                raise ValueError(f"its first line has more than {MAX_COLUMNS} columns")
            yield from rows
        else:
            for number, line in enumerate(io.BytesIO(data), 1):
                if line.strip():
                    entry = parse_json(line, f"annotation file {path}: line {number}", strict=False)
                    if not isinstance(entry, dict):
                        raise ValueError(f"line {number} is not an object")
                    yield entry
    except UserError:
        raise
    except (ValueError, csv.Error) as error:
        raise UserError(f"annotation file {path} cannot be read as a table: {error}") from error


def _as_list(value: Any) -> list[Any]:
    """The captions of a cell that holds a list, a JSON list as text (in a CSV file), one caption, or nothing."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            value = parse_json(value, "cell", strict=False)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _texts(values: list[Any], location: str, rows: Rows) -> list[str]:
    """The values that are text, cut to MAX_CAPTION. A value that is no text or is too long adds a problem."""
    texts = []
    for value in values:
        if not isinstance(value, str):
            # a million equal sentences about one image share their memory
            rows.problems.append(
                sys.intern(f"{location} is malformed: a caption is not text but {type(value).__name__}")
            )
        elif _SURROGATE.search(value):
            rows.problems.append(f"{location} is malformed: a caption is not text in any encoding")
        else:
            if len(value) > MAX_CAPTION:
                rows.problems.append(f"{location} is malformed: a caption has {len(value)} characters")
            texts.append(value[:MAX_CAPTION])
    return texts


def read_split_lists(root: StoragePath, lists: dict[str, str]) -> dict[str, str]:
    """{image name or id: split} from files of lines with a file name and optionally an id.

    Without an id, a file name that is a number is the id.
    """
    split_of: dict[str, str] = {}
    for split, name in lists.items():
        path = root / name
        lines = _read(path).decode("utf-8", errors="replace").splitlines()
        for words in filter(None, map(str.split, lines)):
            filename = words[0].rsplit("/", 1)[-1]
            if split_of.setdefault(filename, split) != split:
                raise UserError(f"data.split_lists: {quoted(filename)} is in {split_of[filename]} and again in {path}")
            if len(words) > 1:
                split_of.setdefault(words[1], split)
            elif filename.isdecimal() and len(filename) < 20:  # a longer number is no id
                split_of[str(int(filename))] = split
    return split_of


def images_folder(root: StoragePath, images: str) -> StoragePath:
    """The folder of the images: a path below the root, or an s3:// prefix."""
    uri = images.rstrip("/") if is_remote(images) else _inside(root, images, "data.images")
    return StoragePath(uri, root.options)


def _inside(folder: StoragePath, name: str, location: str) -> str:
    """`folder/name`, or a URI below the folder, without '.' and '..'. Raises UserError outside of `folder`."""
    if name and name[0] not in "./" and "/." not in name and "//" not in name and not name.endswith("/"):
        return join(folder.uri, name)  # skips the slow checks below in the usual case: there may be a million images
    if is_remote(name):
        if not name.startswith(join(folder.uri, "")):
            raise UserError(f"{location}: {quoted(name)} is outside of {folder}; set data.images to the images' prefix")
        name = name.removeprefix(join(folder.uri, ""))
    if folder.is_remote:
        relative = os.path.normpath(name)
        is_inside, uri = not relative.startswith(("..", "/")), join(folder.uri, relative).removesuffix("/.")
    else:
        base = os.path.normpath(folder.uri)
        uri = os.path.normpath(os.path.join(base, name))  # noqa: PTH118 (a Path would keep the '..')
        is_inside = uri == base or uri.startswith(base.rstrip("/") + "/")
    if not is_inside:
        raise UserError(f"{location}: {quoted(name)} is outside of {folder}; give a path below it")
    return uri


FORMATS: dict[str, Callable[[Source, Any, Rows], None]] = {
    "karpathy": _add_karpathy,
    "coco": _add_coco,
    "nocaps": _add_coco,
    "table": _add_table,
}
