"""Tables with one row per image or caption: JSON lines, CSV, and Parquet, which may contain the images themselves."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.data.formats.source import Identity, Rows, Source, as_list, as_texts, opened, prefix_of, read_file
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, quoted, shorten
from raycap.pipeline.storage.untrusted.documents import parse_json
from raycap.pipeline.storage.untrusted.parquet_files import ParquetFile, RowPlace

TABLE_ENDINGS = (".jsonl", ".ndjson", ".csv", ".parquet")
MAX_COLUMNS = 1000  # limit of a CSV file, because every row gets a value for each column
MAX_NAME = 1000  # characters of the name of an image in a Parquet file


class StoredImage(NamedTuple):
    """An image in a Parquet file. place: its row. path: the name that the file gives the image, if any."""

    place: RowPlace
    path: Any


class ImageFile(NamedTuple):
    """An image file that rows of a table name. stated_split: its value in the column split of the first of them."""

    stated_split: object
    image_id: Identity
    split: str
    uri: str
    captions: list[str]
    location: str  # of the first row


def table_entries(source: Source) -> Iterator[Values]:
    """Yields the rows of a table as {column: value}. An image in the table is a StoredImage. Raises UserError."""
    path = source.annotations
    title = f"annotation file {path}"
    if path.name.endswith(".parquet.gz"):
        raise UserError(f"{title} is compressed as a whole, so that no part of it can be read; unpack it with gunzip")
    try:
        if path.name.endswith(".parquet"):
            with opened(path) as file:
                yield from _parquet_entries(source, file, title)
        elif path.name.removesuffix(".gz").endswith(".csv"):
            yield from _csv_entries(io.StringIO(read_file(path).decode("utf-8-sig"), newline=""))
        else:
            for number, line in enumerate(io.BytesIO(read_file(path)), 1):
                if line.strip():
                    entry = parse_json(line, f"{title}: line {number}", strict=False)
                    if not isinstance(entry, dict):
                        raise ValueError(f"line {number} is not an object")
                    yield entry
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{title} is not text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{title} cannot be read as a table: {error}") from error


def _csv_entries(file: io.StringIO) -> Iterator[Values]:
    """Yields the rows of a CSV file as {column: value}. Raises ValueError or csv.Error."""
    rows = csv.DictReader(file)
    count = len(rows.fieldnames or ())
    if count > MAX_COLUMNS:
        raise ValueError(f"its first line has more than {MAX_COLUMNS} columns")
    for entry in rows:
        if None in entry:
            raise ValueError(
                f"line {rows.line_num} has {count + len(entry[None])} values, but the first line names {count} "
                "columns; put texts with commas into double quotes"
            )
        yield entry


def _parquet_entries(source: Source, file: BinaryIO, title: str) -> Iterator[Values]:
    """Yields the rows of a Parquet file as {column: value}, with only the columns image, captions, id and split."""
    table = ParquetFile(file, title)
    column_of: dict[str, str] = {}  # {column of COLUMNS: its name in the file}
    for role, possible in source.column_names.items():
        found = [name for name in possible if name in table.columns]
        if found:
            column_of[role] = found[0]
    if "image" not in column_of:
        names = printable(", ".join(dict.fromkeys(table.columns)))[:500]
        raise UserError(f"{title} has no column {' or '.join(source.column_names['image'])}; its columns are {names}")
    image = column_of["image"]
    binary = table.binary_column(image)
    if binary is None:
        yield from table.rows(list(column_of.values()))
        return
    if "captions" not in column_of:
        names = " or ".join(source.column_names["captions"])
        raise UserError(f"{title} has images and no column {printable(names)}; set data.columns.captions")
    columns = [name for name in column_of.values() if name != image]
    if binary.names is not None:
        columns.append(binary.names)
    for row, place in zip(table.rows(columns), table.places(binary), strict=True):
        stored = row.get(image) or {}
        yield row | {image: StoredImage(place, stored.get("path"))}


def add_table(source: Source, entries: Iterator[Values], rows: Rows) -> None:
    """Adds the images of a table with the columns image, captions, and maybe id and split (`source.COLUMNS`).

    captions: a list, or one text. Rows that name the same image file are joined. An image that the table itself
    contains must have one row. Raises UserError for rows that break these rules.
    """
    path, begin = source.annotations, rows.count
    files: dict[str, ImageFile] = {}
    stored_names = set[str]()  # names of the images that the table contains
    for number, entry in enumerate(entries):
        location = f"{path}: row {number + 1}"
        image = source.value(entry, "image", location)
        captions = as_texts(as_list(source.value(entry, "captions", location)), location, rows)
        if isinstance(image, StoredImage):
            is_name = isinstance(image.path, str) and 0 < len(image.path) <= MAX_NAME
            name = image.path if is_name else f"row {len(stored_names)}"
            if is_name and name in stored_names:
                remedy = "give one row with a list of captions, or each image its own path"
                raise UserError(f"{location} repeats the image {quoted(name)}; {remedy}")
            stored_names.add(name)
            uri, listed = ImageLocation(path, image.place, name).uri, (name, name.rsplit("/", 1)[-1])
            whole_name = prefix_of(source.annotations_name) + name
            rows.add(*source.id_and_split(entry, listed, whole_name, location), uri, captions, location)
        elif not isinstance(image, str) or not image:
            column = " or ".join(source.column_names["image"])
            raise UserError(f"{location} has no text in the column {column}; the columns are {shorten(entry)}")
        else:
            uri, name = source.find(image, location)
            stated = source.value(entry, "split", location)
            known = files.get(name)
            if known is None:
                whole_name = prefix_of(source.images_name) + name
                image_id, split = source.id_and_split(entry, (image,), whole_name, location)
                files[name] = ImageFile(stated, image_id, split, uri, captions, location)
            elif stated in (None, "", known.stated_split):  # the table has one row per caption
                known.captions.extend(captions)
            else:
                splits = f"the split {quoted(known.stated_split)} and in this row {quoted(stated)}"
                raise UserError(f"{location}: the image {quoted(image)} has {splits}; give it one split")
    for file in files.values():
        rows.add(file.image_id, file.split, file.uri, file.captions, file.location)
    if rows.count == begin:
        raise UserError(f"{path} has no rows")
