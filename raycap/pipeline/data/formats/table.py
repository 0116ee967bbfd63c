"""Tables with one row per image or caption: text, JSON, and Parquet, which may contain the images themselves."""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice, zip_longest
from typing import Any, BinaryIO, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.data.formats.files import is_image, opened, prefix_of, read_file
from raycap.pipeline.data.formats.rows import Identity, Rows, as_texts
from raycap.pipeline.data.formats.source import COLUMNS, Source, columns_named
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, quoted, shorten
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.untrusted.documents import GZIP_START, parse_json
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile, RowPlace

LINE_ENDINGS = (".jsonl", ".ndjson")
MIXED_ENDINGS = (".txt", ".token", ".caption")  # files with these endings may also be no table
TABLE_ENDINGS = (*LINE_ENDINGS, ".csv", ".tsv", ".parquet", ".arrow", *MIXED_ENDINGS)
DELIMITERS = "\t|;,"
MAX_HEAD_BYTES = 2**18  # of a file's beginning, which shows what the file is
MAX_COLUMNS = 1000  # limit of a table of text, because every row gets a value for each column
MAX_ROW_LINES = 100  # lines of a quoted value; more of them have lost their closing quote
BLANK = (None, "")  # the values of empty cells
MAX_NAME = 1000  # characters of the name of an image in a Parquet file
_NUMBER = re.compile(r"#\d+$")  # of a caption, behind the name of an image, in Flickr's "dog.jpg#0<tab>A dog."
# how the names of columns with texts begin
_TEXTS = re.compile(r"\s*(caption|comment|description|sentence|text|title)(?!.*(id|index|number)s?\s*$)", re.IGNORECASE)
_DELIMITER_LINE = re.compile(r"\Asep=.\r?\n")  # with which Excel's exports may begin
_JSON_LINES = re.compile(r"\{[^\n]*\}[ \t\r]*\n\s*\{")


class StoredImage(NamedTuple):
    """An image in a Parquet file. place: its row. path: the name that the file gives the image, if any."""

    place: RowPlace
    path: Any


class ImageFile(NamedTuple):
    """An image file that rows of a table name.

    stated_split, stated_id: the values of these columns in the first of the rows. named: the id that the name gives.
    """

    stated_split: object
    stated_id: object
    named: Identity
    image_id: Identity
    split: str
    uri: str
    captions: list[str]
    location: str  # of the first row


class Head(NamedTuple):
    """The beginning of a file of text. columns: the names of its columns, if it is a table."""

    text: str
    is_table: bool
    columns: tuple[str, ...]


class Header(NamedTuple):
    """How a table of text is divided. is_row: the first line is a row. has_numbers: names end in Flickr's #0 to #4.

    has_blanks: there are blanks around the names of columns, and so around the values.
    """

    columns: tuple[str, ...]
    delimiter: str
    is_row: bool = False
    has_numbers: bool = False
    has_blanks: bool = False


def read_head(path: StoragePath) -> Head:
    """Looks at the beginning of a file that may be a table of text or JSON. Raises UserError if it cannot be read."""
    with opened(path) as file:
        data = file.read(MAX_HEAD_BYTES)
    if data.startswith(GZIP_START):
        with suppress(zlib.error):
            data = zlib.decompressobj(wbits=31).decompress(data, MAX_HEAD_BYTES)
    name = path.name.removesuffix(".gz")
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    text = _DELIMITER_LINE.sub("", data.decode(encoding, errors="replace").lstrip())
    is_table, columns = not name.endswith(".json"), tuple[str, ...]()
    with suppress(ValueError, RecursionError, csv.Error):  # the reader says what is wrong
        if not text.startswith(("[", "{")):
            columns = _read_header(text.partition("\n")[0]).columns
        else:
            is_table = text[0] == "[" or name.endswith(LINE_ENDINGS) or _JSON_LINES.match(text) is not None
            columns = tuple(json.JSONDecoder().raw_decode(text, text.index("{"))[0]) if is_table else ()
    return Head(text, is_table, columns)


def table_entries(source: Source) -> Iterator[Values]:
    """Yields the rows of a table as {column: value}. An image in the table is a StoredImage. Raises UserError."""
    path = source.annotations
    title = f"annotation file {path}"
    if path.name.endswith(".arrow"):
        remedy = "write each of its splits as Parquet, with load_from_disk(...).to_parquet('train.parquet')"
        raise UserError(f"{title} was written by save_to_disk of Hugging Face's datasets; {remedy}")
    try:
        if path.name.endswith(".parquet"):
            with opened(path) as file:
                yield from _parquet_entries(source, file, title)
            return
        data = read_file(path)
        first = data[:MAX_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if first not in (b"[", b"{", b""):
            yield from _delimited_entries(source, data.decode("utf-8-sig"))
            return
        if first == b"[":
            entries = iter(parse_json(data, title, strict=False))
        else:
            lines = ((number, line) for number, line in enumerate(io.BytesIO(data), 1) if line.strip())
            entries = (parse_json(line, f"{title}: line {number}", strict=False) for number, line in lines)
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry, dict):
                raise ValueError(f"row {number} is not an object")
            yield entry
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{title} is not text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{title} cannot be read as a table: {error}") from error


def _read_header(line: str) -> Header:
    """What the first line of a table of text says about it. Raises ValueError or csv.Error."""
    if "\0" in line:
        raise UnicodeDecodeError("utf-8", b"", line.index("\0"), 0, "is of another encoding")
    delimiter = max(DELIMITERS, key=line.count)
    if delimiter not in line and columns_named(COLUMNS["image"], (line.strip(),), "image"):
        return Header((line.strip(),), delimiter)  # images without captions
    if delimiter not in line:
        raise ValueError("its first line has no names of columns with commas, tabs, | or ; between them")
    first, delimiter_after, rest = re.split(f"([{DELIMITERS}])", line, maxsplit=1)
    name = _NUMBER.sub("", first)
    if (is_image(name) or name != first) and "\t" not in rest:
        return Header(("image", "caption"), delimiter_after, is_row=True, has_numbers=name != first)
    names = next(csv.reader([line], delimiter=delimiter))
    columns = tuple(name.strip() for name in names)
    if len(columns) > MAX_COLUMNS:
        raise ValueError(f"its first line has more than {MAX_COLUMNS} columns")
    repeated = next((name for name in columns if name and columns.count(name) > 1), None)
    if repeated:
        raise ValueError(f"its first line names the column {quoted(repeated)} twice; rename one of them")
    return Header(columns, delimiter, has_blanks=columns != tuple(names))


def _delimited_entries(source: Source, text: str) -> Iterator[Values]:
    """Yields the rows of a table of text as {column: value}. Raises ValueError or csv.Error."""
    file = io.StringIO(_DELIMITER_LINE.sub("", text), newline="")
    header = _read_header(file.readline())
    count, captions = len(header.columns), source.columns_in(header.columns, "captions")
    is_last = captions == header.columns[-1:] or (count == 2 and not captions)
    if header.is_row:
        file.seek(0)
    while line := file.readline():
        if not line.strip():
            continue
        values = _read_row(file, line, header, count - 1 if is_last else -1)
        if len(values) > count:
            number = text.count("\n", 0, file.tell() - 1) + 1
            raise ValueError(
                f"line {number} has {len(values)} values, but the first line names {count} columns; put texts with "
                "commas into double quotes, and remove quotes that are not closed"
            )
        if header.has_blanks:
            values = [value.strip() for value in values]
        if header.has_numbers:
            values[0] = _NUMBER.sub("", values[0])
        if not any(values):  # Excel writes rows of empty cells
            continue
        yield dict(zip_longest(header.columns, values))


def _read_row(file: io.StringIO, line: str, header: Header, most: int) -> list[str]:
    """The values of the row that begins with a line. The file is then read up to the end of the row.

    A row that is not as in a CSV file, for example because a caption begins with a quote that nothing closes, is
    divided at its delimiters. most: the number of these; further ones are in the caption.
    """
    delimiter = header.delimiter
    if '"' in line and not header.has_numbers:
        place, lines = file.tell(), chain([line], islice(file, MAX_ROW_LINES))
        rows = csv.reader(lines, strict=True, delimiter=delimiter, skipinitialspace=header.has_blanks)
        with suppress(csv.Error):
            values = next(rows)
            others = [part.split(delimiter) for value in values for part in value.split("\n")[1:]]
            has_swallowed = any(len(cells) > 1 and any(map(is_image, cells)) for cells in others)  # the next rows
            if len(values) <= len(header.columns) and not has_swallowed:
                return values
        file.seek(place)
    return line.rstrip("\r\n").split(delimiter, most)


def _parquet_entries(source: Source, file: BinaryIO, title: str) -> Iterator[Values]:
    """Yields the rows of a Parquet file as {column: value}, with only the columns image, captions, id and split."""
    table = ParquetFile(file, title)
    found = {role: source.columns_in(table.columns, role) for role in source.column_names}
    if not found["image"]:
        names = printable(", ".join(dict.fromkeys(table.columns)))[:500]
        raise UserError(f"{title} has no column {' or '.join(source.column_names['image'])}; its columns are {names}")
    others = dict.fromkeys(filter(_TEXTS.match, table.columns))  # their values are not read
    image = found["image"][0]
    binary = table.binary_column(image)
    if binary is None:
        yield from (others | row for row in table.rows(list(chain(*found.values()))))
        return
    if not found["captions"]:
        names = " or ".join(source.column_names["captions"])
        raise UserError(f"{title} has images and no column {printable(names)}; set data.columns.captions")
    columns = [name for name in chain(*found.values()) if name != image]
    if binary.names is not None:
        columns.append(binary.names)
    for row, place in zip(table.rows(columns), table.places(binary), strict=True):
        stored = row.get(image) or {}
        yield others | row | {image: StoredImage(place, stored.get("path"))}


def _count_other_texts(source: Source, head: list[Values], rows: Rows) -> None:
    """Counts the columns with texts that are not used. head: the first row, if there is one."""
    for entry in head:
        for column in filter(_TEXTS.match, entry):
            if not any(column in source.columns_in(entry, role) for role in COLUMNS):
                rows.leave_out("columns with texts", f"{column} in {source.annotations_name}")


def add_table(source: Source, entries: Iterator[Values], rows: Rows) -> None:
    """Adds the images of a table with the columns image, captions, and maybe id and split (`source.COLUMNS`).

    captions: a list, or one text. Rows that name the same image file are joined. An image that the table itself
    contains must have one row. Raises UserError for rows that break these rules.
    """
    path, begin = source.annotations, rows.count
    head = list(islice(entries, 1))
    _count_other_texts(source, head, rows)
    files: dict[str, ImageFile] = {}
    has_ids_of_captions = False  # rows of one image have different ids
    stored_names = set[str]()  # names of the images that the table contains
    for number, entry in enumerate(chain(head, entries)):
        location = f"{path}: row {number + 1}"
        image = source.value(entry, "image", location)
        captions = as_texts(source.captions(entry, location), location, rows)
        if isinstance(image, dict):  # as Hugging Face names an image file: {"bytes": null, "path": "dog.jpg"}
            image = image.get("path")
        if isinstance(image, StoredImage):
            is_name = isinstance(image.path, str) and 0 < len(image.path) <= MAX_NAME
            name = image.path if is_name else f"row {len(stored_names)}"
            if is_name and name in stored_names:
                remedy = "give one row with a list of captions, or each image its own path"
                raise UserError(f"{location} repeats the image {quoted(name)}; {remedy}")
            stored_names.add(name)
            uri, whole_name = ImageLocation(path, image.place, name).uri, prefix_of(source.annotations_name) + name
            rows.add(*source.id_and_split(entry, name, whole_name, location, rows), uri, captions, location)
        elif not isinstance(image, str) or not image:
            problem = f"{location} has no text in the column {' or '.join(source.column_names['image'])}"
            if source.columns_in(entry, "image"):
                raise UserError(f"{problem}; write the image's file name, or remove the row")
            remedy = "data.columns.image names that of the images' file names"
            raise UserError(f"{problem}; the columns are {shorten(entry)}; {remedy}")
        else:
            uri, name = source.find(image, location)
            stated, stated_id = (source.value(entry, column, location) for column in ("split", "id"))
            known = files.get(name)
            if known is None:
                whole_name = prefix_of(source.images_name) + name
                image_id, split = source.id_and_split(entry, image, whole_name, location, rows)
                named = Identity.of_name(image, whole_name)
                files[name] = ImageFile(stated, stated_id, named, image_id, split, uri, captions, location)
            elif stated in (*BLANK, known.stated_split):  # the table has one row per caption
                known.captions.extend(captions)
                has_ids_of_captions |= known.stated_id not in BLANK and stated_id not in (*BLANK, known.stated_id)
                if not captions:
                    rows.leave_out("rows without a caption", location)
            else:
                splits = f"the split {quoted(known.stated_split)} and in this row {quoted(stated)}"
                raise UserError(f"{location}: the image {quoted(image)} has {splits}; give it one split")
    if has_ids_of_captions:
        rows.leave_out("columns with an id of each caption", str(path))
    for file in files.values():
        image_id = file.named if has_ids_of_captions else file.image_id
        rows.add(image_id, file.split, file.uri, file.captions, file.location)
    if rows.count == begin:
        raise UserError(f"{path} has no rows")
