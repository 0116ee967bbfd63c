"""Manifests: the URI, size, tag and content key of image files, in Parquet files of bounded size.

NAME.parquet                         all rows, of a data set of up to PART_IMAGES images
NAME.parquet.parts/BITS-PART.parquet of a larger one, the rows whose URI has a hash that begins with the BITS bits PART
NAME.parquet.parts/new-*.parquet     rows that a command has added; at its end it moves them to the files above

A file of fewer bits holds rows of several parts. It is divided, and then removed, when the data set has grown.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import TableSpill, read_cache, table_batches, write_table

logger = logging.getLogger(__name__)

MANIFEST = pa.schema([("uri", pa.string()), ("size", pa.int64()), ("tag", pa.string()), ("key", pa.string())])
PART_IMAGES = 2**19  # whose rows are in memory at a time, with some 500 bytes each
_PART = re.compile(r"(\d\d)-(\d+)\.parquet")
_NEW = re.compile(r"new-.*\.parquet")


class Manifest:
    """A manifest whose rows are read and replaced in 2**bits parts. Rows that are added meanwhile outlive a kill."""

    def __init__(self, path: StoragePath, num_images: int) -> None:
        """Divides the rows of a manifest that has fewer parts than a data set of this size needs."""
        self._path, self._folder = path, StoragePath(f"{path.uri}.parts", path.options)
        names = sorted(self._folder.list())
        # {bits: numbers of the parts}; no bits are those of the only file
        parts: dict[int, set[int]] = {}
        for match in filter(None, map(_PART.fullmatch, names)):
            parts.setdefault(int(match[1]), set()).add(int(match[2]))
        self.bits = max((max(0, num_images - 1) // PART_IMAGES).bit_length(), *parts, 0)
        self._stored = parts.pop(self.bits, set())
        self._merged = [self._folder / name for name in reversed(names) if _NEW.fullmatch(name)]  # the newest one first
        self._new = self._divided(self._merged)
        coarse = [self._folder / _name(bits, part) for bits in sorted(parts, reverse=True) for part in parts[bits]]
        if self.bits and path.exists():
            coarse.append(path)
        self._old = self._divided(coarse)
        self._merged += coarse

    def _divided(self, paths: list[StoragePath]) -> TableSpill:
        """The rows of files, divided into parts. A damaged file is named in the log and removed."""
        spill = TableSpill(MANIFEST, 2**self.bits)
        for path in paths:
            try:
                for batch in table_batches(path, MANIFEST):
                    for part, rows in divided(batch, self.bits):
                        spill.append(rows, part)
            except FileNotFoundError:  # another process has merged it
                pass
            except DamagedError as error:
                logger.warning(f"damaged   {error}; what it held is computed again")
                with suppress(OSError):  # a storage that cannot be written
                    path.delete()
        return spill

    @property
    def num_parts(self) -> int:
        return 2**self.bits

    def read(self, part: int) -> pa.Table:
        """The rows of a part, each URI once."""
        is_stored = not self.bits or part in self._stored
        stored = read_cache(self._file(part), MANIFEST) if is_stored else MANIFEST.empty_table()
        if not self.has_other_rows(part):
            return stored
        table = pa.concat_tables([self._new.table(part), stored, self._old.table(part)]).combine_chunks()
        return table.take(pc.index_in(pc.unique(table["uri"]), value_set=table["uri"]))  # the first row of a URI counts

    def has_other_rows(self, part: int) -> bool:
        """Whether rows of a part are in other files than its own."""
        return bool(self._new.batches(part) or self._old.batches(part))

    def add(self, rows: pa.Table) -> None:
        """Writes rows that replace those of the same URIs until the parts are written."""
        self._merged.append(self._folder / f"new-{time.time_ns():020}-{uuid.uuid4().hex[:8]}.parquet")
        write_table(self._merged[-1], rows)

    def write(self, part: int, rows: pa.Table) -> None:
        """Replaces the rows of a part."""
        write_table(self._file(part), rows.combine_chunks())

    def finish(self) -> None:
        """Removes the files whose rows are in the parts, after `write` of each part that changed or `has_other_rows`.

        The folder of parts remains even if it is empty, because another process may be about to write there.
        """
        for path in self._merged:
            path.delete()

    def _file(self, part: int) -> StoragePath:
        return self._folder / _name(self.bits, part) if self.bits else self._path


def _name(bits: int, part: int) -> str:
    return f"{bits:02}-{part:05}.parquet"


def divided(batch: pa.RecordBatch, bits: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each part of a batch with a column uri."""
    if not bits or not len(batch):
        yield 0, batch
        return
    parts = hashes(batch["uri"]) >> np.uint32(32 - bits)
    order = np.argsort(parts, kind="stable")
    batch, parts = batch.take(pa.array(order)), parts[order]
    starts = np.flatnonzero(np.diff(parts, prepend=parts[0] + np.uint32(1))).tolist()
    for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
        yield int(parts[start]), batch.slice(start, end - start)


def hashes(uris: pa.Array) -> np.ndarray:
    """A hash of each URI, uint32, which is the same in every process."""
    return np.fromiter(map(zlib.crc32, uris.cast(pa.binary()).to_pylist()), np.uint32, len(uris))
