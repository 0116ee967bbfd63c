"""Builds the index of CIDEr-D from references that need not fit in memory.

The references are read once, in pieces of whole images. Every later pass reads and writes temporary files in order:

1. Each piece: the words are stored, and the piece's distinct 2-grams, sorted. Their merge is the table of 2-grams.
2. Each piece: its n-grams are counted with that table. The piece's distinct n-grams are stored, sorted, with the number
   of the piece's documents that have each, and its entries, sorted by image, n-gram and reference.
3. The merge of the pieces' n-grams adds up the document frequencies. It gives the table of n-grams, and for each n-gram
   of a piece its number in the table and its inverse document frequency.
4. Each piece: weights, norms and pairs follow from these numbers, and are appended to the tensors of the index.
5. The tensors are copied into one file.

Memory: `memory` bytes for arrays, whatever the number of captions, and 8 bytes per image for a sample of documents.
Besides, pass 2 looks up 2-grams in their table, which is mapped: 12 to 24 bytes per distinct 2-gram, in pages that the
system takes back when memory is short. An image is never divided: one with more than memory / 700 words needs more.

Disk: each caption of 10 words takes up to 1.5 kB of temporary files, and 0.5 to 0.9 kB of the index, which exists twice
while it is copied. Temporary files are written once and read once or twice, in order; they have no name, so nothing of
them remains, however the process ends.
"""

from __future__ import annotations

import io
import json
import math
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from raycap.pipeline.evaluation.scores.cider import (
    N_MAX,
    CiderD,
    HashTable,
    Ragged,
    bigram_keys,
    count_ngrams,
    hashes,
    index_type,
    take,
)

_STEP = 256  # `Runs` remembers one of this many keys, to find ranges of keys without reading them
MEMORY = 512 * 2**20
_WORD_BYTES = 700  # of memory for each word of a piece in passes 2 and 4
_KEY_BYTES = 200  # of memory for each key of a range in a merge
_SPILLS = 64  # the part of the memory that one array has before it becomes a file is 1 / _SPILLS
_SAFETENSORS = {"float64": "F64", "int64": "I64", "int32": "I32", "uint8": "U8"}


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


class _Piece(NamedTuple):
    """Some consecutive images."""

    words: np.ndarray  # (W,) int64, those of all captions
    lengths: np.ndarray  # (C,) int64, the words of each caption
    counts: np.ndarray  # (I,) int64, the captions of each image


class _Sizes(NamedTuple):
    """Numbers of elements: of a piece, or of all pieces before it."""

    images: int = 0
    captions: int = 0
    words: int = 0
    entries: int = 0
    pairs: int = 0

    def plus(self, other: _Sizes) -> _Sizes:
        return _Sizes(*(mine + its for mine, its in zip(self, other, strict=True)))


def build_index(
    references: Iterable[Sequence[Sequence[int]]],
    *,
    caption_documents: bool = False,
    documents: np.ndarray | None = None,
    memory: int = MEMORY,
    path: Path | None = None,
    folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> CiderD:
    """The index of each image's reference captions, given as word-id sequences (ids below 2^30). Iterates once.

    caption_documents: compute document frequencies over captions instead of images, as the meshed-memory transformer's
    reward does. documents: the numbers of the images, ascending, that count as documents, or whose captions do; None
    for all. An n-gram that none of them has gets document frequency 1. memory: bytes, see the top of this file, which
    also states the cost. path: the safetensors file to write, from which the index is then mapped. folder: of temporary
    files, which without a path also have the index; None: that of the path, or the system's. metadata: is read when all
    references have been. The tensors do not depend on `memory`, `path` or `folder`.

    Raises OSError, after which no file is left.
    """
    if path is not None:
        folder = path.parent
    with ExitStack() as stack:
        try:
            build = _Build(stack, memory, folder, caption_documents, documents)
            build.read(references)
            build.count()
            build.merge()
            build.weigh()
            tensors = build.tensors()
            values = {"log_documents": build.log_documents, **(metadata or {})}
            if path is None:
                return CiderD({name: torch.from_numpy(spill.array()) for name, spill in tensors.items()}, values)
            _write(tensors, values, path, build.block)
            return CiderD.load(path)
        except OSError as error:
            if path is not None:
                path.unlink(missing_ok=True)
            place = "the system's temporary folder" if folder is None else folder
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"the index of CIDEr-D cannot be built in {place}: {reason}") from error


class _Build:
    """The passes over the pieces, to be called in the order of their definition."""

    def __init__(
        self, stack: ExitStack, memory: int, folder: Path | None, caption_documents: bool, documents: np.ndarray | None
    ) -> None:
        self._stack, self._memory, self._folder = stack, memory, folder
        self._caption_documents, self._documents = caption_documents, documents
        self.block = max(1, memory // _KEY_BYTES)  # keys that a merge holds at a time
        self._pieces: list[_Sizes] = []
        self._total = _Sizes()
        self._words, self._lengths, self._counts = self._spill(np.int32), self._spill(np.int32), self._spill(np.int32)
        self._num_documents = self._most_references = self._most_times = 0
        self._tables: dict[str, Spill] = {}

    def _spill(self, dtype: Any) -> Spill:
        spill = Spill(dtype, self._memory // _SPILLS, self._folder)
        self._stack.callback(spill.close)
        return spill

    def read(self, references: Iterable[Sequence[Sequence[int]]]) -> None:
        """Pass 1: stores the pieces, and makes the table of 2-grams."""
        runs = Runs(self._spill(np.int64))
        for piece in _pieces(references, max(1, self._memory // _WORD_BYTES)):
            for spill, values in zip((self._words, self._lengths, self._counts), piece, strict=True):
                spill.append(values)
            follows = np.ones(len(piece.words), bool)  # whether the next word belongs to the same caption
            follows[np.cumsum(piece.lengths[piece.lengths > 0]) - 1] = False
            first = np.flatnonzero(follows)
            runs.add(distinct_keys(bigram_keys(piece.words[first], piece.words[first + 1]))[0])
            self._count_documents(piece)
            self._most_references = max(self._most_references, int(piece.counts.max(initial=0)))
            sizes = _Sizes(len(piece.counts), len(piece.lengths), len(piece.words))
            self._pieces.append(sizes)
            self._total = self._total.plus(sizes)
        keys = self._tables["bigrams.keys"] = self._spill(np.int64)
        for merged in runs.merge(self.block):
            keys.append(merged.distinct)
        runs.keys.close()
        self._finish_table("bigrams")

    def _count_documents(self, piece: _Piece) -> None:
        chosen = self._chosen(self._total.images, len(piece.counts))
        self._num_documents += int(piece.counts[chosen].sum() if self._caption_documents else chosen.sum())

    def _chosen(self, begin: int, images: int) -> np.ndarray:
        """Whether each of the images (images,) from the number `begin` on is one of `documents`."""
        if self._documents is None:
            return np.ones(images, bool)
        chosen = np.zeros(images, bool)
        first, last = np.searchsorted(self._documents, (begin, begin + images))
        chosen[self._documents[first:last] - begin] = True
        return chosen

    def _finish_table(self, name: str) -> None:
        """Adds the starts of the buckets to the table whose sorted keys have been written."""
        keys, size = self._tables[f"{name}.keys"], len(self._tables[f"{name}.keys"])
        starts = self._tables[f"{name}.start"] = self._spill(index_type(size))
        bits = max(1, size.bit_length())
        for begin in range(0, size, self.block):
            buckets = (hashes(keys.read(begin, min(begin + self.block, size))) >> np.uint64(64 - bits)).astype(np.int64)
            starts.append(begin + np.searchsorted(buckets, np.arange(len(starts), buckets[-1] + 1)))
        while missing := (1 << bits) + 1 - len(starts):
            starts.append(np.full(min(missing, self.block), size))
        keys.append(np.zeros(1, np.int64))

    def count(self) -> None:
        """Pass 2: stores the n-grams of each piece, and its entries in their final order."""
        self._runs, self._frequency = Runs(self._spill(np.int64)), self._spill(np.int32)
        # For each entry: its n-gram, as a number within the piece; its position in the order of captions, in which the
        # norms are added up; and at that position caption * 4 + n - 1 and the number of times.
        self._local, self._position = self._spill(np.int32), self._spill(np.int32)
        self._slot, self._times = self._spill(np.int32), self._spill(np.int32)
        keys, start = (self._tables[f"bigrams.{name}"].array() for name in ("keys", "start"))
        bigrams, before = HashTable(torch.from_numpy(keys), torch.from_numpy(start)), _Sizes()
        for number, sizes in enumerate(self._pieces):
            piece = self._piece(before, sizes)
            slot, key, times = _entries(Ragged(piece.words, piece.lengths), bigrams)
            distinct, local = distinct_keys(key)
            del key
            image = np.repeat(np.arange(len(piece.counts)), piece.counts)[slot // N_MAX]
            pair = image * max(len(distinct), 1) + local
            order = np.argsort(pair, kind="stable")
            pair = pair[order]
            first = order[_is_first(pair)]  # an entry of each pair
            del pair
            documents = np.arange(len(local)) if self._caption_documents else first
            documents = documents[self._chosen(before.images, len(piece.counts))[image[documents]]]
            self._frequency.append(np.bincount(local[documents], minlength=len(distinct)))
            self._runs.add(distinct)
            for spill, values in zip(
                (self._local, self._position, self._slot, self._times), (local[order], order, slot, times), strict=True
            ):
                spill.append(values)
            self._most_times = max(self._most_times, int(times.max(initial=0)))
            before = before.plus(sizes)
            self._pieces[number] = sizes._replace(entries=len(local), pairs=len(first))
        self._words.close()
        self._total = _Sizes()
        for sizes in self._pieces:
            self._total = self._total.plus(sizes)

    def _piece(self, before: _Sizes, sizes: _Sizes) -> _Piece:
        """A stored piece."""
        columns = (self._words, "words"), (self._lengths, "captions"), (self._counts, "images")
        ranges = [(spill, getattr(before, name), getattr(sizes, name)) for spill, name in columns]
        return _Piece(*(spill.read(begin, begin + size).astype(np.int64) for spill, begin, size in ranges))

    def merge(self) -> None:
        """Pass 3: the table of n-grams, and for those of each piece their numbers and inverse document frequencies."""
        self.log_documents = math.log(max(self._num_documents, 1))
        keys = self._tables["ngrams.keys"] = self._spill(np.int64)
        idfs = self._tables["idf"] = self._spill(np.float64)
        self._numbers, self._idf = self._spill(np.int64), self._spill(np.float64)
        for slices, distinct, number in self._runs.merge(self.block):
            counts = np.concatenate([self._frequency.read(begin, end) for begin, end in slices])
            frequency = np.bincount(number, counts, minlength=len(distinct))
            idf = self.log_documents - np.log(np.maximum(frequency, 1))
            read = 0
            for begin, end in slices:
                part = number[read : read + end - begin]
                self._numbers.put(begin, len(keys) + part.astype(np.int64))
                self._idf.put(begin, idf[part])
                read += end - begin
            keys.append(distinct)
            idfs.append(idf)
        self._runs.keys.close()
        self._frequency.close()
        self._finish_table("ngrams")
        idfs.append(np.zeros(1))  # makes position 0 readable if there is no n-gram

    def weigh(self) -> None:
        """Pass 4: the tensors that have a part for each image."""
        total, num_ngrams = self._total, max(len(self._tables["ngrams.keys"]) - 1, 1)
        types = {
            "reference_offset": index_type(total.captions),
            "length": np.float64,
            "norm": np.float64,
            "pair_offset": index_type(total.pairs),
            "pair_ngram": index_type(num_ngrams),
            "pair_bucket": index_type(total.pairs),
            "pair_start": index_type(total.entries),
            "entry_reference": np.uint8 if self._most_references <= 256 else np.int32,
            "entry_times": np.uint8 if self._most_times <= 255 else np.int32,
        }
        self._tables |= {name: self._spill(dtype) for name, dtype in types.items()}
        before = _Sizes()
        for sizes, run in zip(self._pieces, zip(self._runs.starts, self._runs.starts[1:], strict=False), strict=True):
            for name, values in self._parts(before, sizes, run, num_ngrams).items():
                self._tables[name].append(values)
            before = before.plus(sizes)
        ends = {"reference_offset": total.captions, "pair_offset": total.pairs, "pair_ngram": 0}
        for name, end in (ends | {"pair_bucket": total.pairs, "pair_start": total.entries}).items():
            self._tables[name].append(np.array([end]))

    def _parts(self, before: _Sizes, sizes: _Sizes, run: tuple[int, int], num_ngrams: int) -> dict[str, np.ndarray]:
        """The parts of the tensors of one piece, whose n-grams are those of `run` in the list of all pieces' ones."""
        begin, end = before.entries, before.entries + sizes.entries
        local, position, slot, times = (
            spill.read(begin, end) for spill in (self._local, self._position, self._slot, self._times)
        )
        counts = self._counts.read(before.images, before.images + sizes.images)
        lengths = self._lengths.read(before.captions, before.captions + sizes.captions)
        first_reference = np.cumsum(counts, dtype=np.int64) - counts
        weight = np.empty(len(local))
        weight[position] = self._idf.read(*run)[local]
        weight *= times
        norm = np.sqrt(np.bincount(slot, weight**2, minlength=sizes.captions * N_MAX))
        del weight
        caption = (slot // N_MAX)[position]
        image = np.repeat(np.arange(sizes.images), counts)[caption]
        first = np.flatnonzero(_is_first(image * np.int64(run[1] - run[0] + 1) + local))
        number, owner = self._numbers.read(*run)[local[first]], image[first]
        pairs = np.bincount(owner, minlength=sizes.images)
        pair_offset = np.cumsum(pairs) - pairs
        bucket = pair_offset[owner] + number * pairs[owner] // num_ngrams
        in_bucket = np.bincount(bucket, minlength=len(first))
        return {
            "reference_offset": before.captions + first_reference,
            "length": np.maximum(lengths - 1.0, 0.0),
            "norm": norm,
            "pair_offset": before.pairs + pair_offset,
            "pair_ngram": number,
            "pair_bucket": before.pairs + np.cumsum(in_bucket) - in_bucket,
            "pair_start": begin + first,
            "entry_reference": caption - first_reference[image],
            "entry_times": times[position],
        }

    def tensors(self) -> dict[str, Spill]:
        """The tensors of the index by name; all other temporary files are removed."""
        for spill in (self._lengths, self._counts, self._local, self._position, self._slot, self._times):
            spill.close()
        self._numbers.close()
        self._idf.close()
        return self._tables


def _pieces(references: Iterable[Sequence[Sequence[int]]], most: int) -> Iterator[_Piece]:
    """Pieces of at most this many words and captions, but of at least one image; at least one piece."""
    words, lengths, counts = array("i"), array("i"), array("i")

    def piece() -> _Piece:
        return _Piece(*(np.array(column, np.int64) for column in (words, lengths, counts)))

    for image in references:
        size = max(sum(map(len, image)), len(image), 1)
        if counts and max(len(words), len(lengths), len(counts)) + size > most:
            yield piece()
            words, lengths, counts = array("i"), array("i"), array("i")
        for caption in image:
            words.extend(caption)
            lengths.append(len(caption))
        counts.append(len(image))
    yield piece()


def _is_first(values: np.ndarray) -> np.ndarray:
    """Whether each of the sorted values (n,) differs from the one before."""
    is_first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first


def _entries(captions: Ragged, bigrams: HashTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct n-grams (M,) of captions, by caption, n and position: caption * 4 + n - 1; key; number of times."""
    parts: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32))]
    for numbers, words, lengths in captions.batches():
        grams = count_ngrams(words, lengths, bigrams)
        slots = (take(numbers, grams.caption) * N_MAX + grams.column % N_MAX).int()
        parts.append((slots.numpy(), grams.key.numpy(), grams.times.int().numpy()))
    slot, key, times = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    del parts
    order = np.argsort(slot, kind="stable")
    return slot[order], key[order], times[order]


def _write(tensors: Mapping[str, Spill], metadata: Mapping[str, Any], path: Path, block: int) -> None:
    """Writes tensors as a safetensors file: the size of a JSON header, the header, and the tensors. Closes them.

    safetensors' own writer needs all tensors in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"metadata": json.dumps(metadata)}}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    end = 0
    for name in names:
        begin, end = end, end + len(tensors[name]) * tensors[name].dtype.itemsize
        dtype = _SAFETENSORS[tensors[name].dtype.name]
        header[name] = {"dtype": dtype, "shape": [len(tensors[name])], "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for name in names:
            for begin in range(0, len(tensors[name]), block):
                file.write(tensors[name].read(begin, min(begin + block, len(tensors[name]))).data)
            tensors[name].close()
