"""The token ids of captions in files: written once, a part at a time, and memory-mapped by every process that reads.

ids.npy       int32 (tokens,)       the ids of all captions, one caption after the other
offsets.npy   int64 (captions + 1,) caption c has ids[offsets[c] : offsets[c + 1]]
first.npy     int64 (images + 1,)   image i has the captions first[i] to first[i + 1] - 1
digests.json  of the three; written last
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.atomic import atomic_path
from raycap.pipeline.storage.digests import DIGESTS, is_recorded, require_whole, write_digests

DTYPES = {"ids": "int32", "offsets": "int64", "first": "int64"}
IMAGES_PER_PART = 4096  # whose ids are Python objects at a time


@dataclass(frozen=True)
class TokenFiles:
    """The arrays of a folder of token files, memory-mapped. Several processes of a machine share their memory."""

    ids: np.ndarray
    offsets: np.ndarray
    first: np.ndarray

    @property
    def num_images(self) -> int:
        return len(self.first) - 1

    @classmethod
    def open(cls, folder: Path) -> TokenFiles:
        """Opens the files. Their content is read once per machine, to compare it with the digests.

        Raises DamagedError for a file that is missing, or is not the one that `write_tokens` wrote.
        """
        arrays = {}
        for name, dtype in DTYPES.items():
            path = folder / f"{name}.npy"
            require_whole(path)
            if not is_recorded(path):
                raise DamagedError(f"{folder / DIGESTS} is missing, or lacks {path.name}")
            try:
                arrays[name] = np.load(path, mmap_mode="r")
            except (ValueError, EOFError) as error:
                raise DamagedError(f"{path} is damaged: {error}") from error
            if arrays[name].ndim != 1 or arrays[name].dtype != dtype:
                raise DamagedError(f"{path} is damaged: it is not an array of {dtype} with one dimension")
        return cls(**arrays)


def write_tokens(folder: Path, images: Iterable[Sequence[Sequence[int]]]) -> None:
    """Writes the token files of a folder; existing ones are replaced, each as a whole.

    images: for each image the ids of each of its captions. Needs memory for IMAGES_PER_PART images.
    """
    (folder / DIGESTS).unlink(missing_ok=True)
    images, num_tokens, num_captions = iter(images), 0, 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(_array_file(folder / f"{name}.npy", dtype)) for name, dtype in DTYPES.items()
        }
        files["offsets"].append([0])
        files["first"].append([0])
        while part := list(islice(images, IMAGES_PER_PART)):
            captions = list(chain.from_iterable(part))
            ends = num_tokens + np.cumsum(list(map(len, captions)), dtype=np.int64)
            last = num_captions + np.cumsum(list(map(len, part)), dtype=np.int64)
            files["ids"].append(list(chain.from_iterable(captions)))
            files["offsets"].append(ends)
            files["first"].append(last)
            num_tokens, num_captions = int(ends[-1]) if captions else num_tokens, int(last[-1])
    write_digests(folder, [f"{name}.npy" for name in DTYPES])


@dataclass
class _ArrayFile:
    """A file in numpy's format whose array grows."""

    file: BinaryIO
    dtype: np.dtype[Any]
    length: int = 0

    def append(self, values: Sequence[int] | np.ndarray) -> None:
        self.file.write(np.asarray(values, self.dtype).tobytes())
        self.length += len(values)

    def write_header(self) -> None:
        """Writes the header at the beginning of the file. It has the same size for every length up to 10**20."""
        self.file.seek(0)
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, header)


@contextmanager
def _array_file(path: Path, dtype: str) -> Iterator[_ArrayFile]:
    """A new array of one dimension in a file, which appears as a whole at the end of the context."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        array = _ArrayFile(file, np.dtype(dtype))
        array.write_header()
        begin = file.tell()
        yield array
        array.write_header()
        assert file.tell() == begin, "numpy leaves room for a longer shape"
