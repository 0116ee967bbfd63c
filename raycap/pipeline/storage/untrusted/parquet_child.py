"""The process that parses Parquet files which strangers may have written. `parquet_files` runs this file as a script.

A damaged footer can make Arrow end its whole process, and a few hundred bytes can decompress to gigabytes. The parser
is therefore a process of its own, the child, with limits of memory and time. The child opens no file. Its parent sends
tasks as JSON, and the bytes of each range that the child requests. The child sends pairs of a kind and a content:

    R  start and length of a range, as JSON        E  an error
    B  a record batch, as an Arrow stream          D  the end, with JSON
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raycap.models.config import Values
from raycap.pipeline.storage.untrusted.documents import RangedFile

MAX_MEMORY = 4 * 2**30  # bytes of address space for a task
LEAST_MEMORY, MEMORY_RATIO = 2**29, 32  # more than the address space at the start, and per byte of a file
MAX_CPU_S = 120  # seconds of CPU time per task
MAX_RATIO = 100  # decompressed bytes per compressed byte of columns other than images
MIN_LIMIT_BYTES = 64 * 2**20  # every file may decompress to this size
MIN_LIMIT_VALUES = 1_000_000  # every file may have so many rows, and a larger file one row per byte
BATCH_ROWS = 8192
VALUE_BYTES, NESTED_BYTES = 16, 64  # the parent makes an object of each value, and a larger one of a list or struct


def send_batch(parent: Connection, batch: pa.RecordBatch) -> None:
    batch.validate(full=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    parent.send_bytes(b"B")
    parent.send_bytes(memoryview(sink.getvalue()))


def describe(file: pq.ParquetFile) -> Values:
    """Describes a file as {"columns", "groups", "binary"}.

    columns: the names of all columns. groups: the number of rows of each row group. binary: for each column of files,
    the number of the leaf column with the bytes, and the name of the column of paths or None. A column of files has
    values of bytes, or structs with `bytes` and maybe `path`, as Hugging Face writes them. If no row has bytes, it is a
    column of paths.
    """
    schema, metadata = file.schema_arrow, file.metadata
    leaves = [metadata.schema.column(index) for index in range(len(metadata.schema))]
    numbers = {leaf.path: index for index, leaf in enumerate(leaves) if not leaf.max_repetition_level}
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    binary: dict[str, tuple[int, str | None]] = {}
    counts = Counter(schema.names)
    for field in schema:
        if counts[field.name] > 1:
            continue
        if is_binary(field.type) and field.name in numbers:
            binary[field.name] = numbers[field.name], None
        elif pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            path = f"{field.name}.path" if field.type.get_field_index("path") >= 0 else None
            leaf = numbers.get(f"{field.name}.bytes")
            if leaf is not None and is_binary(field.type.field("bytes").type):
                known = [(group.num_rows, group.column(leaf).statistics) for group in groups]
                if not all(each and each.null_count == num_rows for num_rows, each in known):
                    binary[field.name] = leaf, path
    return {"columns": schema.names, "binary": binary, "groups": [group.num_rows for group in groups]}


def is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def send_rows(parent: Connection, source: RangedFile, columns: list[str]) -> None:
    """Sends the rows of some columns, or parts of columns such as image.path. Raises ValueError above a limit.

    A file can store a long text once and use it in every row. Columns of text are therefore read as dictionaries, so
    that the size of all rows is known before each row gets its copy.
    """
    metadata = pq.ParquetFile(source).metadata
    leaves = [metadata.schema.column(index) for index in range(len(metadata.schema))]
    chosen = [
        index
        for index, leaf in enumerate(leaves)
        if leaf.path in columns or leaf.path.partition(".")[0] in columns  # the name "a" also selects "a.b" in Arrow
    ]
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    stored = min(sum(group.column(index).total_compressed_size for group in groups for index in chosen), source.size)
    max_rows = max(MIN_LIMIT_VALUES, source.size)
    if metadata.num_rows > max_rows:
        raise ValueError(f"it has {metadata.num_rows} rows in {source.size} bytes; the limit is {max_rows}")
    file = pq.ParquetFile(source, read_dictionary=[leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"])
    max_bytes = max(MIN_LIMIT_BYTES, MAX_RATIO * stored)
    num_bytes = 0
    for group in range(len(groups)):  # one by one, because Arrow cannot join nested dictionaries of two groups
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
            num_bytes += sum(map(decoded_bytes, batch.columns))
            if num_bytes > max_bytes:
                raise ValueError(f"its values take more than {max_bytes} bytes, stored in {stored} bytes; divide it")
            send_batch(parent, batch)


def decoded_bytes(array: pa.Array) -> int:
    """The size in bytes of an array without dictionaries: a text counts once for each use.

    Each value counts at least VALUE_BYTES or NESTED_BYTES, so that empty texts and empty lists do not count as nothing.
    """
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return VALUE_BYTES * len(array) + int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)
    if isinstance(array, pa.StructArray):
        return NESTED_BYTES * len(array) + sum(map(decoded_bytes, array.flatten()))
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        return NESTED_BYTES * len(array) + decoded_bytes(array.flatten())
    return max(VALUE_BYTES * len(array), array.nbytes)


def send_values(parent: Connection, file: pq.ParquetFile, group: int, leaf: int, most: int) -> None:
    """Sends a leaf column of a row group as large binaries. Raises ValueError if it has more than `most` bytes."""
    size = file.metadata.row_group(group).column(leaf).total_uncompressed_size
    path = file.metadata.schema.column(leaf).path
    if size <= most:
        column = file.read_row_group(group, columns=[path], use_threads=False).column(0)
        size = column.nbytes
    if size > most:
        raise ValueError(f"a row group has {size} bytes of images; the limit is {most}; write smaller ones")
    while pa.types.is_struct(column.type):
        column = pc.struct_field(column, 0)
    values = pc.cast(column, pa.large_binary()).combine_chunks()
    send_batch(parent, pa.RecordBatch.from_arrays([values], ["values"]))


def answer(parent: Connection, task: Values) -> Values:
    """Executes a task: sends its record batches to the parent, and returns its other results for JSON."""

    def read_range(start: int, length: int) -> bytes:
        parent.send_bytes(b"R")
        parent.send_bytes(json.dumps([start, length]).encode())
        data = parent.recv_bytes()
        if len(data) < length:
            raise ValueError("it ends too early")
        return data

    source = RangedFile(task["size"], read_range)
    match task["kind"]:
        case "rows":
            send_rows(parent, source, task["columns"])
        case "values":
            send_values(parent, pq.ParquetFile(source), task["group"], task["leaf"], task["most"])
        case "describe":
            return describe(pq.ParquetFile(source))
    return {}


def main() -> None:
    parent = Connection(int(sys.argv[1]))
    (_, most), (_, most_memory) = resource.getrlimit(resource.RLIMIT_CPU), resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    start = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    with suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            task = json.loads(parent.recv_bytes())
            memory = start + min(MAX_MEMORY, LEAST_MEMORY + MEMORY_RATIO * task["size"])
            with suppress(ValueError, OSError):  # the system may have no such limit
                resource.setrlimit(resource.RLIMIT_AS, (memory, most_memory))
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MAX_CPU_S, most))
            try:
                kind, content = b"D", json.dumps(answer(parent, task)).encode()
            except MemoryError:  # includes ArrowMemoryError
                kind, content = b"E", b"it needs too much memory"
            except Exception as error:  # damaged files raise nearly any type of error
                kind, content = b"E", " ".join(str(error).split()).encode(errors="replace")
            parent.send_bytes(kind)
            parent.send_bytes(content)


if __name__ == "__main__":
    main()
