"""The rows into which the readers of all formats convert images, and what is wrong with files or not used.

A reader keeps captions as they are, even empty ones, and collects a sentence for each caption that is not valid.
Training stops at the first sentence, and `raycap check` reports all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.config.sections import split_name
from raycap.pipeline.data.dataset import SOURCE_ID, repeated_ids
from raycap.pipeline.data.formats.files import prefix_of
from raycap.pipeline.data.formats.splits import Splits, id_of_name
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown

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

    @classmethod
    def of_name(cls, own_name: str, name: str) -> Identity:
        """The id of an image without one. own_name: in the annotation file. name: in the data set."""
        return cls(id_of_name(name), json.dumps(own_name), is_name=True)

    @property
    def text(self) -> str:
        """The id in the annotation file as text. A number and a text with the same digits are equal."""
        return str(self.number if self.source is None else json.loads(self.source))


class Rows:
    """Collects the images of annotation files, and what is wrong with the files or not used of them.

    splits: how images get their splits. problems: a sentence for each caption that is not valid.
    """

    def __init__(self, splits: Splits = Splits()) -> None:
        self.splits = splits
        self._names = dict.fromkeys(name for _, name in splits.lists.values())  # in the lists, that no image has yet
        # With a list of training images, no image should be in no list.
        self._lists_are_all = not splits.fractions and "train" in {split for split, _ in splits.lists.values()}
        self.problems: list[str] = []
        self._left_out: dict[str, tuple[int, str]] = {}  # {kind of things: their number, name of the first one}
        self._buffer: list[tuple[Any, ...]] = []  # the columns of IMAGES
        self._stored = list[pa.RecordBatch]()
        self.count = 0
        self.file = ""  # the configuration's path of the annotation file that is read

    def add(
        self, image_id: Identity, split: str, uri: str, captions: list[str], location: str, tokens: Sequence[str] = ()
    ) -> None:
        """Adds an image. Raises UserError for a name or split that is not text.

        uri: the text of an ImageLocation. tokens: the tokens of each caption, joined with spaces, if
        `Source.with_tokens` is true.
        """
        if "\0" in uri or SURROGATE.search(uri + split + self.file):
            raise UserError(f"{location} is malformed: its file name or split is not text")
        self._buffer.append((*image_id, self.file, split_name(split), uri, captions, list(tokens)))
        self.count += 1
        if len(self._buffer) == BUFFERED_ROWS:
            self._store()

    def split_of(self, location: str, name: str, names: Sequence[str], *stated: object) -> str:
        """The split of an image: that of the list with one of its names or ids, else the first stated one, else drawn.

        location: names the image in errors. name: in the data set. stated: splits that the annotations give, of which
        None and blanks are none. Raises UserError if one is not text.
        """
        if listed := self.splits.listed(names):
            self._names.pop(listed[1], None)
            return listed[0]
        for split in stated:
            if isinstance(split, bool) or not isinstance(split, str | int | None):
                raise UserError(f"{location}: split {quoted(split)} is not text; correct it")
            if split is not None and str(split).strip():
                return str(split)
        split = self.splits.drawn(name)
        if split == "train" and self._lists_are_all:
            self.leave_out("images in no list of data.split_lists", name, "are in the split train")
        return split

    def leave_out(self, kind: str, name: str, fate: str = "are not used") -> None:
        """Counts a thing that was found and is not used. kind: what it is, in the plural, such as "hidden files"."""
        count, first = self._left_out.get(f"{kind} {fate}", (0, name))
        self._left_out[f"{kind} {fate}"] = count + 1, first

    @property
    def left_out(self) -> list[str]:
        """A sentence for each kind of things that are not used."""
        sentences = [f"{count} {kind}, first {shown(first)}" for kind, (count, first) in self._left_out.items()]
        if self._names:
            names = f"{len(self._names)} names in data.split_lists, which no image has, are not used"
            sentences.append(f"{names}, first {shown(next(iter(self._names)))}")
        return sentences

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
            remedy = "give each image one row and an id of its own, or name another column in data.columns.id"
            if (text, f"file {files[row]}") not in seen and (text, f"image {uri or row}") in seen:
                remedy = "name one of the annotation files, or give each image one row in one of them"
            raise UserError(f"{files[row]}: image {shown(uri or row)} repeats the image id {shown(text)}; {remedy}")
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
