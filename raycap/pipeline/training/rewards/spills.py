"""Arrays that grow on the disk, and the merge of sorted runs of keys, for data that does not fit in memory."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from raycap.pipeline.evaluation.scores.cider import hashes

_STEP = 256  # `Runs` remembers one of this many keys, to find ranges of keys without reading them


class Spill:
    """An array that is written in parts: in memory up to `limit` bytes, then in a file without a name.

    A file without a name disappears with its process, however that ends. folder: where the file is made; None for the
    system's temporary folder. All methods raise OSError.
    """

    def __init__(self, dtype: Any, limit: int, folder: Path | None) -> None:
        self.dtype, self._limit, self._folder, self._size = np.dtype(dtype), limit, folder, 0
        self._file: IO[bytes] = io.BytesIO()

    def __len__(self) -> int:
        return self._size

    def append(self, values: np.ndarray) -> None:
        self.put(self._size, values)

    def put(self, position: int, values: np.ndarray) -> None:
        """Writes values from a position on, which may be beyond the end."""
        self._size = max(self._size, position + len(values))
        if isinstance(self._file, io.BytesIO) and self._size * self.dtype.itemsize > self._limit:
            content, self._file = self._file, tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (see `close`)
            self._file.write(content.getbuffer())
        self._file.seek(position * self.dtype.itemsize)
        self._file.write(np.ascontiguousarray(values, self.dtype).data.cast("B") if len(values) else b"")

    def read(self, begin: int, end: int) -> np.ndarray:
        """The values at the positions from begin to end, which cannot be changed."""
        self._file.seek(begin * self.dtype.itemsize)
        size = (end - begin) * self.dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise OSError(f"a temporary file ends {size - len(data)} bytes too early: another process has cut it")
        return np.frombuffer(data, self.dtype)

    def array(self) -> np.ndarray:
        """All values: a copy, or a map of the file's pages that stays valid after `close`."""
        if isinstance(self._file, io.BytesIO):
            return self.read(0, self._size).copy()
        self._file.flush()
        return np.memmap(self._file, self.dtype, "c", shape=(self._size,))

    def close(self) -> None:
        """Frees the memory or the disk."""
        self._file.close()


class Merged(NamedTuple):
    """The keys of all runs in one range of `hashes`."""

    slices: list[tuple[int, int]]  # begin and end in `Runs.keys`, of those runs that have keys in the range
    distinct: np.ndarray  # (n,) the distinct keys in the order of `hashes`
    number: np.ndarray  # for each key of the slices, one slice after the other, its position in `distinct`


class Runs:
    """Runs of keys, each of distinct keys in the order of `hashes`, one after the other in `keys`."""

    def __init__(self, keys: Spill) -> None:
        self.keys = keys
        self.starts = [0]  # of the runs, and the end of the last one
        self._samples: list[np.ndarray] = []  # of each run, the hash of its keys at 0, _STEP, 2 * _STEP, ...

    def add(self, keys: np.ndarray) -> None:
        self.keys.append(keys)
        self.starts.append(len(self.keys))
        self._samples.append(hashes(keys[::_STEP]))

    def merge(self, rows: int) -> Iterator[Merged]:
        """All keys in ranges of about `rows` keys, in the order of `hashes`.

        A range has fewer than rows + 2 * _STEP * (number of runs + 1) keys. Keys are read once, and up to _STEP of
        a run once more at the end of a range.
        """
        samples = np.sort(np.concatenate([*self._samples, np.zeros(0, np.uint64)]))
        # None is the end of the last range. Equal bounds would make empty ranges.
        bounds: list[np.uint64 | None] = [*np.unique(samples[max(1, rows // _STEP) :: max(1, rows // _STEP)]), None]
        positions = self.starts[:-1]
        for bound in bounds:
            slices, parts = [], []
            for run, begin in enumerate(positions):
                # The keys below the bound end before the first remembered key that is not below it.
                first, end = self.starts[run], self.starts[run + 1]
                if bound is not None:
                    end = min(end, first + int(np.searchsorted(self._samples[run], bound)) * _STEP)
                if end <= begin:
                    continue
                keys = self.keys.read(begin, end)
                if bound is not None:
                    keys = keys[: np.searchsorted(hashes(keys), bound)]
                if len(keys):
                    slices.append((begin, begin + len(keys)))
                    parts.append(keys)
                    positions[run] = begin + len(keys)
            if parts:
                yield Merged(slices, *distinct_keys(np.concatenate(parts)))


def distinct_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys in the order of `hashes`, and the position in them of each key (n,). Takes 40 bytes a key."""
    hashed = hashes(keys)
    order = np.argsort(hashed)
    hashed = hashed[order]
    is_first = np.ones(len(keys), bool)
    np.not_equal(hashed[1:], hashed[:-1], out=is_first[1:])
    del hashed
    number = np.empty(len(keys), np.int32)
    number[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return keys[order[is_first]], number
