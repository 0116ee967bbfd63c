"""A source of images: an annotation file, the folder of its images, and the values of its entries.

A file that does not have its format raises UserError.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from raycap.pipeline.config.sections import ColumnSection
from raycap.pipeline.data.formats.files import UNTYPED_ENDINGS
from raycap.pipeline.data.formats.rows import MAX_CAPTION, SURROGATE, Identity, Rows
from raycap.pipeline.data.formats.splits import id_of_name
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import plain_name, printable, quoted, shorten
from raycap.pipeline.storage.path import StoragePath, join
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.storage.untrusted.documents import parse_json

# {column: the names that it may have if `data.columns` gives none}. The first name that an entry has is used.
COLUMNS = {
    "image": ("image", "file_name"),
    "captions": ("captions", "caption", "text"),
    "id": ("image_id", "img_id", "id"),
    "split": ("split",),
}
_NUMBERED = r"([ _.-]?\d{1,3})?"  # the end of names such as caption_0 and caption1
# an item of a list that Python or NumPy wrote, with the comma before it; NumPy writes no commas
_ITEM = re.compile(r"""[\s,]*(?:(['"])((?:(?!\1)[^\\]|\\.|\1\1)*)\1|None|nan|null)""", re.DOTALL)
_NUMBER = re.compile("0|-?[1-9][0-9]{0,18}")  # the texts of whole numbers, of which each number has one
_DIGITS = re.compile("[0-9]{1,18}")  # other texts of numbers


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
        self, entry: Mapping[str, object], own_name: str, name: str, location: str, rows: Rows
    ) -> tuple[Identity, str]:
        """The id and split of an image.

        own_name: the image's name in the file, which replaces a missing id. name: in the data set. Raises UserError for
        values of a wrong type.
        """
        identifier = self.value(entry, "id", location)
        image_id = Identity.of_name(own_name, name)
        if identifier not in (None, "", own_name):  # the column image_id may be that of the names
            image_id = self.image_id(identifier, location, name)
        names = [own_name] if image_id.is_name else [own_name, str(identifier)]
        return image_id, rows.split_of(location, name, names, self.value(entry, "split", location), self.split)


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
