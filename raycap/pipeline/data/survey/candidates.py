"""The data sets that the names of files suggest: their form, their annotation files, and the keys that read them."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raycap.pipeline.data.formats.files import is_image, matches, opened
from raycap.pipeline.data.formats.rows import COLUMNS
from raycap.pipeline.data.formats.table import TABLE_ENDINGS
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, printable, shown
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import parse_json
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile

MAX_SOURCES = 50  # annotation files that are listed one by one
MAX_GROUPS = 20  # of annotation files with the same ending that are tried
MAX_HEADER_BYTES = 2**20  # of the first line of a table
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test"}
SPLIT_WORDS |= dict.fromkeys(("val", "validation", "valid", "dev"), "val")
# names of columns beside those of `pipeline.data.formats.rows.COLUMNS`
OTHER_COLUMNS = {
    "image": ("img", "jpg", "png", "filename", "filepath", "file", "path", "image_path", "image_name", "image_file"),
    "captions": ("sentences", "sentence", "description", "title", "comment", "alt_text", "alt", "prompt", "txt", "raw"),
}


@dataclass(frozen=True)
class Candidate:
    """Files that may be one data set. form: JSON, table, tars or text. files: the annotations, or images with text."""

    form: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """How a candidate is read. keys: those of the section `data`. columns: those of the first table."""

    form: str  # in words
    keys: dict[str, Any]
    has_image_files: bool = False  # whether annotations name image files
    columns: tuple[str, ...] = ()


def find_candidates(names: Sequence[str]) -> Iterator[Candidate]:
    """What a data set of these files may be, the likeliest first."""
    documents = [name for name in names if name.endswith((".json", ".json.gz"))]
    for group in _groups(documents):
        if len(documents) == 1 or _has_name_of_annotations(group[0]):
            yield Candidate("JSON", group)
    for ending in TABLE_ENDINGS:
        for group in _groups([name for name in names if name.endswith((ending, f"{ending}.gz"))]):
            yield Candidate("table", group)
    for endings in ((".tar",), (".tar.gz", ".tgz")):  # the reader refuses the second ones with a remedy
        for group in _groups([name for name in names if name.endswith(endings)]):
            yield Candidate("tars", group)
    if texts := images_with_text(names):
        yield Candidate("text", tuple(texts))


def images_with_text(names: Iterable[str]) -> list[str]:
    """The images beside which is a text file of the same name."""
    stems = {name[: -len(".txt")] for name in names if name.lower().endswith(".txt")}
    return [name for name in names if is_image(name) and name.rpartition(".")[0] in stems]


def read_names(root: StoragePath, candidate: Candidate, names: Sequence[str]) -> Reading:
    """The keys for a candidate. names: all files below `root`. Raises UserError for files that cannot be read."""
    for name in filter(is_image, names) if candidate.form == "text" else candidate.files:
        if not _is_text(name):
            raise UserError(f"{shown(root / name)} has a name that is not text in UTF-8; rename it")
    if candidate.form == "text":
        return Reading("text beside images", _text_keys(candidate.files, names))
    keys = _sources(candidate.files, names)
    if candidate.form == "tars":
        return Reading("WebDataset tars", keys)
    if candidate.form == "JSON":
        return Reading("JSON", keys, has_image_files=True)
    first = root / candidate.files[0]
    columns, binary = _columns_of(first)
    chosen = _guess_columns(columns, binary)
    image = chosen.get("image") or next((name for name in COLUMNS["image"] if name in columns), None)
    form = "Parquet with images" if image in binary else f"table ({_table_ending(first.name)})"
    return Reading(form, keys | ({"columns": chosen} if chosen else {}), image not in binary, tuple(columns))


def split_of(name: str) -> str | None:
    """The split that the last such word of a path names, as in data/train-0001.parquet."""
    words = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLIT_WORDS]
    return SPLIT_WORDS[words[-1]] if words else None


def _is_text(name: str) -> bool:
    """Whether a file's name is text in UTF-8; Python reads other bytes as halves of surrogate pairs."""
    return not re.search("[\ud800-\udfff]", name)


def _table_ending(name: str) -> str:
    return next(ending for ending in TABLE_ENDINGS if name.removesuffix(".gz").endswith(ending))


def _has_name_of_annotations(name: str) -> bool:
    """Whether a JSON file is named like annotations; many data sets have other JSON files."""
    return re.match(r"dataset|caption|annotation|nocaps|image_info", name.rsplit("/", 1)[-1]) is not None


def _groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Annotation files that may be one data set: those at one depth whose names begin with the same word.

    The highest folders come first. At most MAX_GROUPS.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        words = re.findall("[a-z]+", name.rsplit("/", 1)[-1].lower())
        word = next((word for word in words if word not in SPLIT_WORDS), "")
        groups.setdefault((name.count("/"), word), []).append(name)
    order = sorted(groups, key=lambda key: (key[0], "dataset" not in groups[key][0], -len(groups[key]), groups[key]))
    return [tuple(groups[key]) for key in islice(order, MAX_GROUPS)]


def _text_keys(texts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The keys for images with text: a source for each folder that a split names, else the folder of all of them.

    Folders without any text are left out, as far as the folders can be listed.
    """
    parents = {name.rpartition("/")[0] for name in texts}
    top = os.path.commonpath(parents) if all(parents) else ""
    prefix = f"{top}/" if top else ""
    folders = sorted({top if parent == top else prefix + parent[len(prefix) :].partition("/")[0] for parent in parents})
    splits = [split_of(folder) for folder in folders]
    keys: dict[str, Any] = {"format": "text"}  # nothing marks a folder on S3
    if all(splits) and (len(set(splits)) > 1 or folders == [top]):
        pairs = zip(folders, splits, strict=True)
        return keys | {"sources": [{"annotations": folder, "split": split} for folder, split in pairs]}
    with_text = tuple(f"{folder}/" for folder in folders)
    others = (name for name in names if is_image(name) and name.startswith(prefix) and not name.startswith(with_text))
    if any(others) and top not in folders and len(folders) <= MAX_SOURCES:
        return keys | {"sources": [{"annotations": folder} for folder in folders]}
    return keys | {"annotations": top or "."}


def _sources(files: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The keys for annotation files: one file or pattern, or a source for each split that their names tell."""
    by_split: dict[str | None, list[str]] = {}
    for name in files:
        by_split.setdefault(split_of(name), []).append(name)
    if len(files) == 1 or None in by_split:
        patterns = _patterns(files, names)
        is_one = len(patterns) == 1
        return {"annotations": patterns[0]} if is_one else {"sources": [{"annotations": each} for each in patterns]}
    groups = [(split, pattern) for split, group in by_split.items() for pattern in _patterns(group, names)]
    return {"sources": [{"annotations": pattern, "split": split} for split, pattern in groups]}


def _patterns(files: Sequence[str], names: Sequence[str]) -> list[str]:
    """A pattern that matches these of all names and no other, or these names. Raises UserError for too many of them."""
    if len(files) == 1:
        return list(files)
    begin = _common_begin(files).rstrip("0123456789")
    end = _common_begin([name[len(begin) :][::-1] for name in files])[::-1].lstrip("0123456789")
    ending = f".{files[0].rsplit('.', 1)[-1]}"
    possible = [name for name in names if name.endswith(ending)]
    for pattern in (f"{begin}*{ending}", f"{begin}*{end}"):
        segments = pattern.split("/")
        is_plain = pattern.endswith(ending) and not re.search(r"[\[{*?]", begin + end)
        if is_plain and {name for name in possible if matches(name.split("/"), segments)} == set(files):
            return [pattern]
    if len(files) > MAX_SOURCES:
        raise UserError(f"{len(files)} annotation files such as {shown(files[0])} have no common name; rename them")
    return list(files)


def _common_begin(names: Sequence[str]) -> str:
    """The longest text with which all of these names begin."""
    first, last = min(names), max(names)
    return first[: next((place for place, char in enumerate(first) if last[place : place + 1] != char), len(first))]


def _guess_columns(columns: Sequence[str], binary: Sequence[str]) -> dict[str, str]:
    """The names of a table's columns that are not the usual ones. binary: the columns that contain files."""
    chosen: dict[str, str] = {}
    for role, others in OTHER_COLUMNS.items():
        if not set(COLUMNS[role]) & set(columns):
            found = next((name for other in others for name in columns if name.lower() == other), None)
            if role == "image" and found is None and binary:
                found = binary[0]
            if found is not None:
                chosen[role] = found
    return chosen


def _columns_of(path: StoragePath) -> tuple[list[str], list[str]]:
    """The columns of a table, and those of a Parquet file that hold files. Raises UserError."""
    title = f"annotation file {path}"
    with opened(path) as file:
        if path.name.endswith(".parquet"):
            table = ParquetFile(file, title)
            return table.columns, [name for name in table.columns if table.binary_column(name) is not None]
        line = file.readline(MAX_HEADER_BYTES)
    if path.name.endswith(".csv"):
        try:
            columns = next(csv.reader(io.StringIO(line.decode("utf-8-sig", errors="replace"))), [])
        except csv.Error as error:
            raise UserError(f"{title} cannot be read as a table: {one_line(error)}; correct its first line") from error
        if len(columns) == 1 and re.search("[;\t|]", columns[0]):
            problem = f"has one column, {printable(columns[0])[:100]!r}"
            raise UserError(f"{title} {problem}; separate the columns by commas instead")
        return columns, []
    entry = parse_json(line, f"{title}: line 1", strict=False) if line.startswith(b"{") else {}
    return list(entry), []
