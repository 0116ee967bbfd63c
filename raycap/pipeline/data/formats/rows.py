"""The rows that every reader makes of an annotation file, and what readers share.

A reader does not change captions, not even empty ones. It collects the problems of single captions: training stops at
the first problem, and `raycap check` reports all of them. A file that does not have its format raises UserError.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, quoted
from raycap.pipeline.storage.tables import TableSpill
from raycap.pipeline.storage.untrusted.documents import parse_json

MAX_CAPTION = 10_000  # characters; metrics compare each word of a caption with each of another

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: JSON can contain it, but no encoding can


BUFFERED_ROWS = 10_000  # that are Python objects; the others are in Arrow arrays
_JOINED_BATCHES = 16  # to which late captions are added at a time
LISTS = pa.list_(pa.string())
IMAGES = pa.schema(
    [("image_id", pa.int64()), ("split", pa.string()), ("uri", pa.string()), ("captions", LISTS), ("tokens", LISTS)]
)
LATE = pa.schema([("row", pa.int64()), ("captions", LISTS)])


class Rows:
    """The images of annotation files, in Arrow arrays, and `problems`: sentences about single captions.

    The last BUFFERED_ROWS to 2 BUFFERED_ROWS images are Python objects, and can be given more captions at once. Many
    images are in a memory-mapped file (`TableSpill`).
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._buffer: list[
            tuple[int, str, str, list[str], list[str]]
        ] = []  # one tuple of the columns of IMAGES per row
        self._late: list[tuple[int, list[str]]] = []  # captions of rows that are no longer in the buffer
        self._images, self._num_stored = TableSpill(IMAGES), 0
        self._more = TableSpill(LATE)  # batches that are sorted by row

    def __len__(self) -> int:
        return self._num_stored + len(self._buffer)

    def add(
        self, image_id: int, split: str, uri: str, captions: list[str], location: str, tokens: Sequence[str] = ()
    ) -> None:
        """Adds an image. Raises UserError for values that a table or file system cannot hold.

        uri: the text of an ImageLocation. tokens: with `Source.with_tokens` the file's tokens of each caption, joined
        with spaces.
        """
        if not -(2**63) <= image_id < 2**63:
            raise UserError(f"{location} is malformed: the image id {quoted(image_id)} has more than 64 bits")
        if "\0" in uri or SURROGATE.search(uri + split):
            raise UserError(f"{location} is malformed: its file name or split is not text")
        self._buffer.append((image_id, split, uri, captions, list(tokens)))
        if len(self._buffer) == 2 * BUFFERED_ROWS:
            self._images.append(_batch(self._buffer[:BUFFERED_ROWS], IMAGES))
            self._num_stored += BUFFERED_ROWS
            del self._buffer[:BUFFERED_ROWS]

    def add_captions(self, row: int, captions: list[str]) -> None:
        """Adds captions to those of an image that was added before as the row with this number."""
        position = row - self._num_stored
        if position >= 0:
            self._buffer[position][3].extend(captions)
            return
        self._late.append((row, captions))
        if len(self._late) == BUFFERED_ROWS:
            self._more.append(_late_batch(self._late))
            self._late = []

    def table(self, *, with_tokens: bool) -> pa.Table:
        """The images as a table of IMAGES, without the column tokens unless it is asked for."""
        table = pa.Table.from_batches([*self._images.batches(), _batch(self._buffer, IMAGES)])
        late = [*self._more.batches(), _late_batch(self._late)]
        if sum(map(len, late)):
            joined = TableSpill(pa.schema([IMAGES.field("captions")]))
            for captions in _joined(table["captions"], late):
                joined.append(pa.RecordBatch.from_arrays([captions], schema=joined.schema))
            table = table.set_column(IMAGES.get_field_index("captions"), "captions", joined.table()["captions"])
        return table if with_tokens else table.drop_columns(["tokens"])


def _batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as a batch of a table."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _late_batch(rows: Sequence[tuple[int, list[str]]]) -> pa.RecordBatch:
    """Rows of LATE as a batch, sorted by `row`; those of the same row keep their order."""
    return _batch(sorted(rows, key=itemgetter(0)), LATE)


def _joined(lists: pa.ChunkedArray, late: Sequence[pa.RecordBatch]) -> Iterator[pa.Array]:
    """The lists, each followed by those of the batches of LATE for its row, in their order; some at a time."""
    start, late_rows = 0, [batch["row"].to_numpy() for batch in late]
    for first in range(0, lists.num_chunks, _JOINED_BATCHES):
        chunk = pa.concat_arrays(lists.chunks[first : first + _JOINED_BATCHES])
        limits = [np.searchsorted(rows, [start, start + len(chunk)]) for rows in late_rows]
        parts = [batch.slice(begin, end - begin) for batch, (begin, end) in zip(late, limits, strict=True)]
        table = pa.Table.from_batches([part for part in parts if len(part)], LATE).combine_chunks()
        owners = table["row"].to_numpy() - start
        further = pa.concat_arrays(table["captions"].chunks or [pa.array([], LISTS)])
        lengths = [pc.list_value_length(each).to_numpy(zero_copy_only=False) for each in (chunk, further)]
        # the row of each value; a stable sort leaves the values of a list before those that follow it
        of_values = np.concatenate([np.repeat(np.arange(len(chunk)), lengths[0]), np.repeat(owners, lengths[1])])
        values = pa.concat_arrays([chunk.flatten(), further.flatten()]).take(
            pa.array(np.argsort(of_values, kind="stable"))
        )
        counts = np.bincount(of_values, minlength=len(chunk))
        yield pa.ListArray.from_arrays(np.cumsum([0, *counts]), values).cast(LISTS)
        start += len(chunk)


def as_list(value: Any) -> list[Any]:
    """The captions of a cell that holds a list, a JSON list of texts (in a CSV file), one caption, or nothing."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            items = parse_json(value, "cell", strict=False)
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return items
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_texts(values: list[Any], location: str, rows: Rows) -> list[str]:
    """The values that are text, cut to MAX_CAPTION. A value that is no text or is too long adds a problem."""
    texts = []
    for value in values:
        if not isinstance(value, str):
            # a million equal sentences about one image share their memory
            rows.problems.append(
                sys.intern(f"{location} is malformed: a caption is not text but {type(value).__name__}")
            )
        elif SURROGATE.search(value):
            rows.problems.append(f"{location} is malformed: a caption is not text in any encoding")
        else:
            if len(value) > MAX_CAPTION:
                rows.problems.append(f"{location} is malformed: a caption has {len(value)} characters")
            texts.append(value[:MAX_CAPTION])
    return texts


def lines_of(data: bytes, name: str) -> list[str]:
    """The captions in a text of one caption per line, without empty lines. Raises UserError."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(name)} is not text in UTF-8; write it again in this encoding") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def malformed(location: str, error: Exception) -> UserError:
    """The error for an entry that a reader cannot read."""
    return UserError(f"{location} is malformed ({type(error).__name__}: {error})")
