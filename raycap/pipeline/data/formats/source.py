"""A source of images, and the rows into which the readers of all formats convert it.

A reader keeps captions as they are, even empty ones, and collects a sentence for each caption that is not valid.
Training stops at the first sentence, and `raycap check` reports all of them. A file that does not have its format
raises UserError.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.sections import SPLIT_WORDS, ColumnSection, split_name
from raycap.pipeline.data.dataset import SOURCE_ID, repeated_ids
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import plain_name, printable, quoted, shorten, shown
from raycap.pipeline.storage.path import StoragePath, join
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import gunzip, parse_json

# {column: the names that it may have if `data.columns` gives none}. The first name that an entry has is used.
COLUMNS = {
    "image": ("image", "file_name"),
    "captions": ("captions", "caption", "text"),
    "id": ("id", "image_id"),
    "split": ("split",),
}
_NUMBERED = r"([ _.-]?\d{1,3})?"  # the end of names such as caption_0 and caption1
# an item of a list that Python or NumPy wrote, with the comma before it; NumPy writes no commas
_ITEM = re.compile(r"""[\s,]*(?:(['"])((?:(?!\1)[^\\]|\\.|\1\1)*)\1|None|nan|null)""", re.DOTALL)
IMAGE_ENDINGS = (
    ".apng", ".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".pjp", ".pjpeg", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
OTHER_ENDINGS = (".arw", ".cr2", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".psd", ".svg", ".tga")  # not read
TEXT_ENDINGS = (".txt", ".caption")  # of files with the captions of the image of the same name
UNTYPED_ENDINGS = (".csv", ".tsv", ".txt", ".token", ".caption")  # of tables in which every value is text
_NUMBER = re.compile("0|-?[1-9][0-9]{0,18}")  # the texts of whole numbers, of which each number has one
_DIGITS = re.compile("[0-9]{1,18}")  # other texts of numbers
MAX_ANNOTATION_BYTES = 2 * 2**30  # limit of a file that is read as a whole; large annotation files have 1 GB
MAX_FILES = 100_000  # files that one pattern may name
_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")
MAX_CAPTION = 10_000  # characters, because the time of metrics grows with the square of a caption's length
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which JSON can contain, but UTF-8 cannot
BUFFERED_ROWS = 10_000  # rows that are collected before they become Arrow arrays, which take less memory
LISTS = pa.list_(pa.string())
IMAGES = pa.schema(
    [
        ("image_id", pa.int64()),
        SOURCE_ID,
        ("is_name", pa.bool_()),
        ("file", pa.dictionary(pa.int32(), pa.string())),  # the configuration's path of the annotation file
        ("split", pa.string()),
        ("uri", pa.string()),
        ("captions", LISTS),
        ("tokens", LISTS),
    ]
)


class Identity(NamedTuple):
    """The id of an image. number: within raycap, unique in the data set.

    source: the id in the annotation file as JSON text, or None if it is the number. is_name: True if the file has no id
    for the image, so that the image's name in the file stands for it.
    """

    number: int
    source: str | None = None
    is_name: bool = False

    @property
    def text(self) -> str:
        """The id in the annotation file as text. A number and a text with the same digits are equal."""
        return str(self.number if self.source is None else json.loads(self.source))


@dataclass(frozen=True)
class Splits:
    """How images get their splits: from lists, or by fractions for images without any split."""

    lists: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # the result of `read_split_lists`
    fractions: Mapping[str, float] = field(default_factory=dict)  # {split: fraction}; if empty, all images are in train
    seed: int = 0
    by_folder: bool = False  # whether folders for validation and test decide
    found: set[str] = field(default_factory=set)  # file names in `lists` that images have
    unlisted: list[str] = field(default_factory=list)  # images that are in train because no list has them

    def listed(self, *names: str) -> str | None:
        """The split whose list contains one of these names or ids of an image. None if no list does."""
        for name in map(plain_name, names if self.lists else ()):
            for known in (*_ends(name), name if "/" in name else f"/{name}"):
                if entry := self.lists.get(known):
                    self.found.add(entry[1])
                    return entry[0]
        return None

    def drawn(self, name: str) -> str:
        """The split of an image, chosen by its folder, or by a hash of its name, which other images do not change."""
        if self.by_folder and (split := split_in_name(name.rpartition("/")[0])) not in (None, "train"):
            return split
        if not self.fractions:
            if self.lists:
                self.unlisted.append(name)
            return "train"
        digest = _digest(f"{self.seed} {name}")
        position = int.from_bytes(digest[:6], "big") / 2**48 * sum(self.fractions.values())
        splits = sorted(self.fractions)
        ends = itertools.accumulate(self.fractions[split] for split in splits)
        return next((split for split, end in zip(splits, ends, strict=True) if position < end), splits[-1])


def split_in_name(name: str, *, first: bool = False) -> str | None:
    """The split that a path such as data/train-0001.parquet names, or None.

    If there are several, the last one, because it is that of the file. first: the first one instead.
    """
    words = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLIT_WORDS]
    return SPLIT_WORDS[words[0 if first else -1]] if words else None


def id_of_name(name: str) -> int:
    """An image's id: the first 63 bits of the sha256 of its name in the data set.

    Among a million images, two ids are equal with probability 5e-8. A data set with equal ids cannot be read.
    """
    return int.from_bytes(_digest(name)[:8], "big") >> 1


def _digest(name: str) -> bytes:
    """The sha256 of a name. Raises UserError for a name that is not UTF-8."""
    try:
        return hashlib.sha256(name.encode()).digest()
    except UnicodeEncodeError as error:
        raise UserError(f"the name {quoted(name)} of an image is not text in UTF-8; rename the file") from error


def _ends(name: str) -> Iterator[str]:
    """Yields a path, and the paths that remain when its first folders are removed one after the other."""
    while name:
        yield name
        name = name.partition("/")[2]


def read_split_lists(root: StoragePath, lists: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """{end of an image's path, or its id: (its split, its name in the list)}.

    lists: {split: file in which each line has an image's path, and maybe its id}. If a line has no id and its file name
    is a number, the number also counts as the id. The file name alone of a line with folders has the key /NAME, because
    it stands only for an image without folders.
    """
    split_of: dict[str, tuple[str, str]] = {}
    for split, name in lists.items():
        path = root / name
        lines = read_file(path).decode("utf-8-sig", errors="replace").splitlines()
        for line in filter(None, map(str.strip, map(plain_name, lines))):
            possible = line.split(), [line], line.rsplit(None, 1)  # a file name may contain blanks
            words = next((words for words in possible if is_image(words[0])), line.split())
            name = words[0]
            known, _ = split_of.setdefault(name, (split, name))
            if known != split:
                raise UserError(f"data.split_lists: {quoted(name)} is in {known} and again in {path}")
            *folders, filename = _ends(name)
            for end in (*folders[1:], f"/{filename}" if folders else filename):
                split_of.setdefault(end, (split, name))
            if len(words) > 1:
                split_of.setdefault(words[1], (split, name))
            elif filename.isdecimal() and len(filename) < 20:  # a longer number cannot be an id of 64 bits
                split_of[str(int(filename))] = split, name
    return split_of


@contextmanager
def errors_named(path: StoragePath) -> Iterator[None]:
    """Turns an OSError of the block into a UserError that names the annotation file."""
    try:
        yield
    except IsADirectoryError as error:
        raise UserError(f"annotation file {path} is a folder; give a file in it, or set data.format to text") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"annotation file {path} does not exist; data.annotations is relative to data.root") from error
    except OSError as error:
        raise UserError(f"annotation file {path} cannot be read: {error}") from error


def read_file(path: StoragePath) -> bytes:
    """The content of an annotation file, decompressed if it is a gzip file. Raises UserError."""
    with errors_named(path):
        data = path.read_bytes(MAX_ANNOTATION_BYTES)
    return gunzip(data, f"annotation file {path}")


@contextmanager
def opened(path: StoragePath) -> Iterator[BinaryIO]:
    """Opens an annotation file that is read in parts. Raises UserError."""
    with errors_named(path), path.open() as file:
        yield file


def read_json(path: StoragePath) -> Any:
    """The content of an annotation file in JSON. Raises UserError."""
    return parse_json(read_file(path), f"annotation file {path}", strict=False)


def is_image(name: str) -> bool:
    """True if a file has an image's ending and is not hidden."""
    base = name.rsplit("/", 1)[-1]
    return base.lower().endswith(IMAGE_ENDINGS) and not base.startswith(".")


def is_hidden(name: str) -> bool:
    """True if a file or a folder above it is hidden."""
    return "/." in f"/{name}" and any(part[:1] == "." and part not in (".", "..") for part in name.split("/"))


def unused_kind(name: str) -> str | None:
    """What an image's file is that no reader uses. None for other files, of which nobody expects that they are used."""
    if is_hidden(name):
        return "hidden images" if name.lower().endswith((*IMAGE_ENDINGS, *OTHER_ENDINGS)) else None
    return "images in formats that are not read" if name.lower().endswith(OTHER_ENDINGS) else None


def find_files(root: StoragePath, pattern: str) -> list[str]:
    """The files below a folder that a pattern names. Raises UserError if there is none.

    {000..009} matches each of these numbers, and {a,b} each of the words. *, ?, [...] and ** have the same meaning as
    in a shell. A pattern without these characters, or the name of an existing file, names one file.
    """
    if not (glob.has_magic(pattern) or _BRACES.search(pattern)) or (root / pattern).exists():
        return [pattern]
    found: list[str] = []
    for each in itertools.islice(_expanded(pattern), MAX_FILES + 1):
        found += matching(root, each) if glob.has_magic(each) else [each]
    if not 0 < len(found) <= MAX_FILES:
        problem = f"names more than {MAX_FILES} files" if found else "matches no file"
        raise UserError(f"data.annotations: {shown(pattern)} {problem} below {root}; correct the pattern")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the pattern with each {..} replaced by one of its values, in all combinations."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, words = match.groups()
    if words is None:
        values: Iterable[str] = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    else:
        values = words.split(",")
    for value in values:
        for rest in _expanded(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{value}{rest}"


def matching(root: StoragePath, pattern: str) -> list[str]:
    """The files below a folder that match a pattern with wildcards, sorted."""
    if not root.is_remote:
        names = glob.glob(pattern, root_dir=root.path, recursive=True)  # noqa: PTH207 (Path.glob refuses some patterns)
        return sorted(name for name in names if (root.path / name).is_file())
    parts = pattern.split("/")
    start = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    folder = "/".join(parts[:start])
    found = (root / folder if folder else root).list()
    return sorted("/".join([*parts[:start], name]) for name in found if matches(name.split("/"), parts[start:]))


def matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """True if the segments of a path match those of a pattern, in which ** stands for any number of segments."""
    if patterns == ["**"]:
        return True
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**":
        return any(matches(names[start:], patterns[1:]) for start in range(len(names)))
    return fnmatchcase(names[0], patterns[0]) and matches(names[1:], patterns[1:])


@dataclass(frozen=True)
class Source:
    """An annotation file, the folder of its images, and how it is read.

    images: None if only captions and ids are read. The images then need neither files nor names.
    """

    annotations: StoragePath
    images: StoragePath | None
    annotations_name: str = ""  # the configuration's path of `annotations`; names of images begin with it
    images_name: str = ""  # the configuration's path of `images`
    split: str | None = None  # split of images for which neither the file nor a list names one
    splits: Splits = field(default_factory=Splits)
    columns: ColumnSection = field(default_factory=ColumnSection)
    with_tokens: bool = False  # True: also read the tokens of the captions, which only Karpathy's JSON has

    @cached_property
    def column_names(self) -> dict[str, tuple[str, ...]]:
        """{column of COLUMNS: the names that it may have}."""
        chosen = self.columns.model_dump()
        return {column: names if chosen[column] is None else (chosen[column],) for column, names in COLUMNS.items()}

    def value(self, entry: Mapping[str, object], column: str, location: str) -> Any:
        """The value of a column of COLUMNS in an entry. None if the entry does not have the column.

        Raises UserError if the column is missing and `data.columns` names it.
        """
        if names := self.columns_in(entry, column):
            return entry[names[0]]
        if getattr(self.columns, column) is not None:
            wanted, found = quoted(self.column_names[column][0]), shorten(entry)
            raise UserError(f"{location} has no column {wanted} (data.columns.{column}); it has {found}")
        return None

    def columns_in(self, names: Iterable[str], column: str) -> tuple[str, ...]:
        """Those of a table's columns that are a column of COLUMNS. Only captions may have several, with numbers."""
        return columns_named(self.column_names[column], tuple(names), column)

    def captions(self, entry: Mapping[str, object], location: str) -> list[Any]:
        """The captions in an entry, in its column or in all its numbered columns. Raises UserError as `value` does."""
        names = self.columns_in(entry, "captions")
        if len(names) == 1:
            return as_list(entry[names[0]])
        if names:
            return [item for name in names for item in as_list(entry[name]) if item not in ("", None)]
        if "conversations" in entry:
            remedy = "write one row for each image, with the columns image and caption"
            raise UserError(f"{location} has conversations, as LLaVA's files do, and no captions; {remedy}")
        return as_list(self.value(entry, "captions", location))

    def text(self, entry: Mapping[str, Any], key: str) -> Any:
        """An image's name or split in JSON. "none" if it is missing and no images are read. May raise KeyError."""
        return entry.get(key, "none") if self.images is None else entry[key]

    def find(self, name: str, location: str) -> tuple[str, str]:
        """The result of `inside` for an image. The path or URI is "" if no images are read."""
        return ("", os.path.normpath(name)) if self.images is None else inside(self.images, name, location)

    def image_id(self, value: Any, location: str, name: str | None = None) -> Identity:
        """The id that an annotation file gives an image. Raises UserError if it is neither a whole number nor text.

        name: of the image in the data set, whose hash is the number of an id that is no number. By default it is made
        of the annotation file's name and the id.
        """
        is_untyped = self.annotations.name.removesuffix(".gz").endswith(UNTYPED_ENDINGS)
        is_number = is_untyped and isinstance(value, str) and _NUMBER.fullmatch(value)
        if is_number or (isinstance(value, float) and value.is_integer()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | str) or SURROGATE.search(str(value)):
            raise UserError(f"{location}: the id {quoted(value)} is neither a whole number nor text; correct it")
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            return Identity(value)
        is_number = isinstance(value, str) and _DIGITS.fullmatch(value)
        if is_number:
            return Identity(int(value), json.dumps(value))
        return Identity(id_of_name(name or f"{self.annotations_name} {json.dumps(value)}"), json.dumps(value))

    def id_and_split(
        self, entry: Mapping[str, object], own_name: str, name: str, location: str
    ) -> tuple[Identity, str]:
        """The id and split of an image.

        The split is the first that is given by: the lists, the entry, the source, a hash of the name. own_name: the
        image's name in the file, which replaces a missing id. name: in the data set. Raises UserError for values of a
        wrong type.
        """
        identifier = self.value(entry, "id", location)
        if identifier in (None, "", own_name):  # the column image_id may be that of the names
            image_id = Identity(id_of_name(name), json.dumps(own_name), is_name=True)
            split = self.splits.listed(own_name)
        else:
            image_id = self.image_id(identifier, location, name)
            split = self.splits.listed(own_name, str(identifier))
        if split is None:
            split = self.value(entry, "split", location)
        if split is None or not str(split).strip():
            split = self.split or self.splits.drawn(name)
        if not isinstance(split, str | int) or isinstance(split, bool):
            raise UserError(f"{location}: split {quoted(split)} is not text")
        return image_id, str(split)


@lru_cache(maxsize=100)
def columns_named(wanted: tuple[str, ...], columns: tuple[str, ...], role: str) -> tuple[str, ...]:
    """The columns with the first of the wanted names that a table has.

    role: a column of COLUMNS. If no column has such a name exactly, case and blanks around it do not count, and the
    names of captions may end in numbers, such as caption_0, caption_1.
    """
    if exact := next((name for name in wanted if name in columns), None):
        return (exact,)
    for name in wanted:
        pattern = re.compile(re.escape(name) + (_NUMBERED if role == "captions" else ""), re.IGNORECASE)
        if found := tuple(column for column in columns if pattern.fullmatch(column.strip())):
            return found
    return ()


def inside(folder: StoragePath, name: str, location: str) -> tuple[str, str]:
    """The path or URI of a file below a folder, and its path relative to the folder. Neither contains '.' or '..'.

    name: relative to the folder, or a whole path or URI. Raises UserError if the name leads out of the folder.
    """
    if not name.isascii() or "\\" in name:
        name = _name_on_disk(folder, name)
    is_plain = name[:1] not in ("", ".", "/") and name[-1] != "/" and "/." not in name and "//" not in name
    if is_plain:  # most names are, and there may be a million
        return join(folder.uri, name), name
    if is_remote(name):
        prefix = join(folder.uri, "")
        if not name.startswith(prefix):
            raise UserError(f"{location}: {quoted(name)} is outside of {folder}; set data.images to the images' prefix")
        name = name.removeprefix(prefix)
    if folder.is_remote:
        relative = os.path.normpath(name)
        uri = join(folder.uri, relative).removesuffix("/.")
        is_inside = not relative.startswith(("..", "/"))
    else:
        base = os.path.normpath(folder.uri)
        uri = os.path.normpath(os.path.join(base, name))  # noqa: PTH118 (a Path would keep the '..')
        relative = uri[len(base) :].lstrip("/")
        is_inside = uri == base or uri.startswith(base.rstrip("/") + "/")
    if not is_inside:
        raise UserError(f"{location}: {quoted(name)} is outside of {folder}; give a path below it")
    return uri, relative


def _name_on_disk(folder: StoragePath, name: str) -> str:
    """The spelling of a name under which a local file exists: as it is, with slashes, or with other accents."""
    plain = plain_name(name)
    names = () if folder.is_remote else (name, plain, unicodedata.normalize("NFD", plain))
    return next((each for each in names if os.path.lexists(join(folder.uri, each))), name)


@cache
def prefix_of(folder: str) -> str:
    """The configuration's path of a folder or archive, with which the names of images in it begin: "" or PATH/."""
    path = folder.rstrip("/") if is_remote(folder) else os.path.normpath(folder)
    return "" if path == "." else f"{path}/"


class Rows:
    """Collects the images of annotation files, and what is wrong with the files or not used of them.

    problems: a sentence for each caption that is not valid.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._left_out: dict[str, tuple[int, str]] = {}  # {kind of things: their number, name of the first one}
        self._buffer: list[tuple[Any, ...]] = []  # the columns of IMAGES
        self._stored = list[pa.RecordBatch]()
        self.count = 0
        self.file = ""  # the configuration's path of the annotation file that is read

    def add(
        self, image_id: Identity, split: str, uri: str, captions: list[str], location: str, tokens: Sequence[str] = ()
    ) -> None:
        """Adds an image. Raises UserError for values that cannot be in a table or a file system.

        uri: the text of an ImageLocation. tokens: the tokens of each caption, joined with spaces, if
        `Source.with_tokens` is true.
        """
        if "\0" in uri or SURROGATE.search(uri + split + self.file):
            raise UserError(f"{location} is malformed: its file name or split is not text")
        self._buffer.append((*image_id, self.file, split_name(split), uri, captions, list(tokens)))
        self.count += 1
        if len(self._buffer) == BUFFERED_ROWS:
            self._store()

    def leave_out(self, kind: str, name: str, fate: str = "are not used") -> None:
        """Counts a thing that was found and is not used. kind: what it is, in the plural, such as "hidden files"."""
        count, first = self._left_out.get(f"{kind} {fate}", (0, name))
        self._left_out[f"{kind} {fate}"] = count + 1, first

    @property
    def left_out(self) -> list[str]:
        """A sentence for each kind of things that are not used."""
        return [f"{count} {kind}, first {shown(first)}" for kind, (count, first) in self._left_out.items()]

    def _store(self) -> None:
        """Moves the rows of the buffer into Arrow arrays."""
        columns = zip(*self._buffer, strict=True) if self._buffer else [()] * len(IMAGES)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, IMAGES, strict=True)]
        self._stored.append(pa.RecordBatch.from_arrays(arrays, schema=IMAGES))
        self._buffer = []

    def table(self, *, with_tokens: bool) -> pa.Table:
        """The images as a table of IMAGES without is_name and file. with_tokens: whether it has the column tokens.

        Raises UserError for an id that occurs twice.
        """
        self._store()
        table = with_distinct_ids(pa.Table.from_batches(self._stored))
        return table.drop_columns(["is_name", "file"] + ["tokens"] * (not with_tokens))


def with_distinct_ids(table: pa.Table) -> pa.Table:
    """A table of IMAGES in which the numbers, and the ids of each split, are distinct.

    If a name stands for the ids of several images, all names begin with the path of the annotation file, from the
    folder of all these files on. A number that several files use becomes a source_id. Raises UserError if a file, a
    split or an image has an id twice.
    """
    is_repeated = repeated_ids(table)
    if not pc.any(is_repeated).as_py():
        return table
    numbers, sources, files = (table[name].to_pylist() for name in ("image_id", SOURCE_ID.name, "file"))
    seen = set[tuple[str, str]]()
    for row in np.flatnonzero(is_repeated.to_numpy()).tolist():
        text = Identity(numbers[row], sources[row]).text
        split, uri, is_name = (table[name][row].as_py() for name in ("split", "uri", "is_name"))
        places = {(text, f"file {files[row]}"), (text, f"image {uri or row}")}
        if not is_name:
            places.add((text, f"split {split}"))
        if not seen.isdisjoint(places):
            raise UserError(
                f"{files[row]}: image {shown(uri or row)} repeats the image id {shown(text)}; give each image one row "
                "and an id of its own, or name another column in data.columns.id"
            )
        seen |= places
        if not is_name:
            source = text if sources[row] is None else sources[row]
            numbers[row], sources[row] = id_of_name(f"{files[row]} {text}"), source
    if pc.any(pc.and_(is_repeated, table["is_name"])).as_py():
        folder = prefix_of(os.path.commonprefix(files).rpartition("/")[0])  # noqa: RUF071 (character by character)
        for row in np.flatnonzero(table["is_name"].to_numpy()).tolist():
            sources[row] = json.dumps(prefix_of(files[row]).removeprefix(folder) + json.loads(sources[row]))
    table = table.set_column(0, "image_id", pa.array(numbers, pa.int64()))
    return table.set_column(1, SOURCE_ID, pa.array(sources, pa.string()))


def as_list(value: object) -> list[Any]:
    """The captions in a cell with a list, one caption, or nothing. In a table of text, a list is itself a text."""
    if value is None:
        return []
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):  # a caption may begin with a bracket
            items = parse_json(value, "cell", strict=False)
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return items
        return _written_list(value.strip()) or [value]
    return value if isinstance(value, list) else [value]


def _written_list(text: str) -> list[str]:
    """The texts of a list as Python or NumPy write it: ['a', "b"] or ['a' 'b']. Empty for any other text."""
    items, place = list[str](), 1
    with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about backslashes that escape nothing
        while match := _ITEM.match(text, place, 100 * MAX_CAPTION):
            place = match.end()
            if quote := match[1]:  # two quotes in a text are one, as in SQL
                items.append(ast.literal_eval(quote + match[2].replace(2 * quote, f"\\{quote}") + quote))
        if re.fullmatch(r"[\s,]*\]", text[place:]):
            return items
    return []


def as_texts(values: list[Any], location: str, rows: Rows) -> list[str]:
    """The values that are text, cut to MAX_CAPTION. Adds a problem to `rows` for any other value or a longer one."""
    texts = []
    for value in values:
        if not isinstance(value, str):
            rows.problems.append(f"{location} is malformed: a caption is not text but {type(value).__name__}")
        elif SURROGATE.search(value):
            rows.problems.append(f"{location} is malformed: a caption is not text in any encoding")
        else:
            if len(value) > MAX_CAPTION:
                rows.problems.append(f"{location} is malformed: a caption has {len(value)} characters")
            texts.append(value[:MAX_CAPTION])
    return texts


def lines_of(data: bytes, name: str) -> list[str]:
    """The captions in a text file of one caption per line, without empty lines. Raises UserError."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(name)} is not text in UTF-8; write it again in this encoding") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def malformed(location: str, error: Exception) -> UserError:
    """The error for an entry that a reader cannot read."""
    problem = f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({type(error).__name__}: {error})"
    return UserError(f"{location} {problem}; correct it, or name another annotation file")
