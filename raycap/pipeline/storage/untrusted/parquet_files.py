"""Reads Parquet files from elsewhere: rows of small columns, and where the values of a large binary column are.

Every failure is a UserError that begins with the file's name. Memory is bounded, because a few hundred bytes can
decompress to gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import one_line, printable
from raycap.pipeline.storage.untrusted.documents import MAX_RATIO, MIN_LIMIT_BYTES
from raycap.pipeline.storage.untrusted.parquet_pages import (
    DICTIONARY_PAGE,
    OTHER_PAGE,
    PageValue,
    file_size,
    read_pages,
    read_row_groups,
    sum_pages,
)

if TYPE_CHECKING:
    import pyarrow as pa

MIN_LIMIT_VALUES = 1_000_000  # what any column may hold; a larger file may hold one value per byte


class BinaryColumn(NamedTuple):
    """A column of files' contents, and that of their names, if there is one."""

    values: str  # the path of the leaf, such as image.bytes
    names: str | None


class ParquetFile:
    """An open Parquet file. `name` begins the errors' messages."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        import pyarrow.parquet as pq

        self.file, self.name = file, name
        with self._errors_named():
            opened = pq.ParquetFile(file)
            self.schema, schema = opened.schema_arrow, opened.metadata.schema
            self.leaves = [schema.column(index) for index in range(len(schema))]
            self.groups = read_row_groups(file, len(self.leaves))

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.groups)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, without those of their parts."""
        return list(self.schema.names)

    def binary_column(self, name: str) -> BinaryColumn | None:
        """A column of bytes, or of structs with `bytes` and maybe `path`, as Hugging Face writes; None for others."""
        import pyarrow as pa

        if self.schema.names.count(name) != 1:
            return None
        kind = self.schema.field(name).type
        if _is_binary(kind):
            return BinaryColumn(name, None)
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_binary(kind.field("bytes").type):
            return BinaryColumn(f"{name}.bytes", f"{name}.path" if kind.get_field_index("path") >= 0 else None)
        return None

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows, with bounded memory for each batch of them.

        columns: the names of the columns to read, or of their parts, such as image.path. A repeated text is stored once
        and would be decoded for each row. Columns of text are therefore read as dictionaries, and the size of their
        text is added up before it is decoded.
        """
        import pyarrow.parquet as pq

        with self._errors_named():
            # Arrow reads a column "a.b" where "a" is asked for
            chosen = [
                index
                for index, leaf in enumerate(self.leaves)
                if leaf.path in columns or leaf.path.partition(".")[0] in columns
            ]
            stored = sum(group.columns[index].total_compressed_size for group in self.groups for index in chosen)
            self._require_small(chosen, stored)
            texts = [leaf.path for leaf in self.leaves if leaf.physical_type == "BYTE_ARRAY"]
            file = pq.ParquetFile(self.file, read_dictionary=texts)
            limit = left = max(MIN_LIMIT_BYTES, MAX_RATIO * stored)
            for group in range(len(self.groups)):  # one at a time: Arrow cannot join nested dictionaries of two groups
                for batch in file.iter_batches(8192, row_groups=[group], columns=list(columns)):
                    left -= sum(map(_decoded_bytes, batch.columns))
                    if left < 0:
                        raise UserError(f"{self.name} has more than {limit} bytes of text in {stored} bytes")
                    yield from batch.to_pylist()

    def _require_small(self, columns: Sequence[int], stored: int) -> None:
        """Raises UserError if leaf columns have too many values, or bytes when they are decompressed.

        stored: the bytes of these columns by the footer, which `sum_pages` compares with the file.
        """
        limit = max(MIN_LIMIT_BYTES, MAX_RATIO * stored)
        num_bytes, num_values = sum_pages(self.file, self.groups, columns, limit)
        if num_bytes > limit:
            raise UserError(f"{self.name} decompresses to more than {limit} bytes; write it again without compression")
        self._require_few_values(num_values, stored)

    def _require_few_values(self, count: int, stored: int) -> None:
        """Raises UserError if a column of `stored` bytes has too many values."""
        limit = max(MIN_LIMIT_VALUES, stored)
        if count > limit:
            raise UserError(f"{self.name} has a column of {count} values in {stored} bytes; the limit is {limit}")

    def value_places(self, leaf: str) -> Iterator[PageValue]:
        """Where the value of each row is in a leaf column of bytes. Only the headers of its pages are read."""
        (index,) = (index for index, each in enumerate(self.leaves) if each.path == leaf)
        column = self.leaves[index]
        if column.physical_type != "BYTE_ARRAY" or column.max_repetition_level:
            raise UserError(f"{self.name}: the column {printable(leaf)} is no column of one file per row")
        stored = min(file_size(self.file), sum(group.columns[index].total_compressed_size for group in self.groups))
        self._require_few_values(self.num_rows, stored)
        with self._errors_named():
            for group in self.groups:
                chunk = group.columns[index]
                dictionary, count = (0, 0), 0
                for page in read_pages(self.file, chunk):
                    if page.kind == DICTIONARY_PAGE:
                        dictionary = page.start, page.length
                    elif page.kind != OTHER_PAGE:
                        count += page.num_values
                        if count > group.num_rows:
                            raise ValueError(f"the column {leaf} has more values than rows")
                        for row in range(page.num_values):
                            place = (page.start, page.length, *dictionary, row)
                            yield PageValue(*place, chunk.codec, column.max_definition_level)
                if count != group.num_rows:
                    raise ValueError(f"the column {leaf} has {count} values and {group.num_rows} rows")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raises UserError for Arrow's errors, and for what `pipeline.storage.untrusted.parquet_pages` refuses."""
        import pyarrow as pa

        try:
            yield
        except UserError:
            raise
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and type(error) is not OSError:  # Arrow raises OSError itself
                raise  # the storage is out of order
            raise UserError(f"{self.name} is not a readable Parquet file: {one_line(error)}") from error


def _is_binary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _decoded_bytes(array: pa.Array) -> int:
    """The size of an array in which each text is stored where it is used."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)
    if isinstance(array, pa.StructArray):
        return sum(map(_decoded_bytes, array.flatten()))
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        return _decoded_bytes(array.flatten())
    return int(array.nbytes)
