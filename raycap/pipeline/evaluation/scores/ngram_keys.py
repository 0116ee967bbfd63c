"""n-grams of word ids as int64 keys, and tables of such keys, for the CIDEr-D index. Shapes: R captions, T words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

N_MAX = 4  # CIDEr-D uses n-grams of 1 to 4 words
_PAIRS = 1 << 20  # at most this many pairs of positions are compared at a time, to stay in a processor's cache
_ROWS = 256  # at most this many captions are compared at a time
_FIBONACCI = -7046029254386353131  # 2^64 divided by the golden ratio, as int64 (Fibonacci hashing)


class Grams(NamedTuple):
    """Distinct n-grams of captions, sorted by caption."""

    caption: Tensor  # index of the caption
    column: Tensor  # start * 4 + n - 1, where start is the position of the n-gram's first word
    key: Tensor  # see `_ngram_keys`
    times: Tensor  # float64, how often the caption contains the n-gram


def count_ngrams(words: Tensor, lengths: Tensor, bigrams: HashTable) -> Grams:
    """The distinct n-grams of captions (R, T) of `lengths` (R,). bigrams: the keys of the references' 2-grams."""
    width = words.shape[1]
    inside = torch.arange(width, device=words.device) < lengths[:, None]
    # Captions are the last dimension, for vectorized comparisons. Padding gets negative ids, each different.
    padded = words.where(inside, -1 - torch.arange(width, device=words.device)).t().int().contiguous()  # (T, R)
    same_word = padded[:, None] == padded[None]  # (T, T, R); for captions this is faster than sorting
    same = same_word  # whether the n-grams of the current order at two positions are equal
    # (T, T, 1): whether the second position is before the first one
    is_before = torch.ones(width, width, dtype=torch.bool, device=words.device).tril(-1)[:, :, None]
    parts = [(words.new_zeros(0),) * 4]
    for order, key in enumerate(_ngram_keys(words, bigrams)[:width]):
        if order:  # two n-grams are equal when their (n-1)-grams and their last words are equal
            same = same[:-1, :-1] & same_word[order:, order:]
        starts = width - order
        earlier = (same & is_before[:starts, :starts]).sum(1, dtype=torch.int32)
        first = (inside[:, order:] & (earlier == 0).t()).flatten().nonzero().squeeze(1)
        times = same.sum(1, dtype=torch.int32).t().flatten()
        column = first % starts * N_MAX + order
        parts.append((first // starts, column, take(key.flatten(), first), take(times, first)))
    caption, column, keys, times = (torch.cat(part) for part in zip(*parts, strict=True))
    by_caption = caption.argsort(stable=True)
    return Grams(*(take(part, by_caption) for part in (caption, column, keys, times.double())))


def bigram_keys(first: Any, second: Any) -> Any:
    """Keys of 2-grams as `_ngram_keys` defines them, from arrays or tensors with their first and second words."""
    return (first << 30 | second) << 2 | 1


def _ngram_keys(words: Tensor, bigrams: HashTable) -> list[Tensor]:
    """Keys of the n-grams at every position, exact for up to 2^30 words: one tensor (R, T - n + 1) for each n.

    The two lowest bits of a key are n - 1. The bits above them depend on n: the word (n = 1), both words (2), the
    number of the first 2-gram and the last word (3), or the numbers of the first and the last 2-gram (4). The number of
    a 2-gram is its position in `bigrams`. A 3-gram or 4-gram with a 2-gram that is not in `bigrams` has the key -1:
    no reference contains it.
    """
    pairs = bigram_keys(words[:, :-1], words[:, 1:])
    number, in_table = (part.view_as(pairs) for part in bigrams.find(pairs.flatten()))
    number = number.where(in_table, -1)
    first, last = number[:, :-1], words[:, 2:]
    three = ((first << 30 | last) << 2 | 2).where(first >= 0, -1)
    first, last = number[:, :-2], number[:, 2:]
    four = ((first << 30 | last) << 2 | 3).where((first >= 0) & (last >= 0), -1)
    return [words << 2, pairs, three, four]


@dataclass(frozen=True)
class HashTable:
    """Distinct int64 keys in the order of their `hashes`; a key's position in `keys` is its number.

    A bucket has about one key, so a look-up costs about two memory accesses. A binary search would cost twenty.
    """

    keys: Tensor  # (size + 1,); the last one is no key, but makes the position after the last key readable
    start: Tensor  # (buckets + 1,); position of each bucket's first key, and the end of the last bucket

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], name: str) -> HashTable:
        """The table whose two tensors `tensors` contains under this name. Raises KeyError if it lacks them."""
        return cls(tensors[f"{name}.keys"], tensors[f"{name}.start"])

    def __len__(self) -> int:
        return len(self.keys) - 1

    def find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (n,) of values (n,), and whether the table has each value; if not, its position has no meaning."""
        num_buckets = len(self.start) - 1  # a power of two
        buckets = _buckets(values, num_buckets.bit_length() - 1)
        position, end = take(self.start, buckets).long(), take(self.start, buckets + 1).long()
        return find_in_buckets(self.keys, values, position, end)


def find_in_buckets(keys: Tensor, values: Tensor, position: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in `keys` of values (n,), each within its bucket, and whether the bucket has it.

    position, end (n,) int64: the begin and the end of the bucket of each value. `position` is changed. `keys` has at
    least one more key than the buckets.
    """
    present = (take(keys, position) == values) & (position < end)
    pending = (~present & (position + 1 < end)).nonzero().squeeze(1)
    while len(pending):
        following = take(position, pending) + 1
        position[pending] = following
        present[pending] = hit = take(keys, following) == take(values, pending)
        pending = pending[~hit & (following + 1 < take(end, pending))]
    return position, present


def hashes(keys: np.ndarray) -> np.ndarray:
    """Distinct numbers (n,) uint64 for distinct keys (n,). Their highest bits are the bucket in a `HashTable`.

    So keys in the order of their hashes are in the order of buckets, however many buckets there are.
    """
    return (keys * np.int64(_FIBONACCI)).view(np.uint64)


def _buckets(keys: Tensor, bits: int) -> Tensor:
    """The bucket of each key, a number of this many bits: the high bits of a product, which depend on the whole key.

    The mask removes the copies of the sign bit that `>>` shifts in.
    """
    return ((keys * _FIBONACCI) >> (64 - bits)) & ((1 << bits) - 1)


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index] along the first dimension. On a CPU `index_select` is several times faster than indexing."""
    return values.index_select(0, index)


def index_type(limit: int) -> Any:
    """int32 if it can hold values up to `limit`, else int64. Smaller arrays make look-ups faster."""
    return np.int32 if limit < 1 << 31 else np.int64


def by_length(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Splits a batch into parts of similar length, which need little padding and bounded memory.

    Yields (row numbers, longest length) of each part, the longest captions first.
    """
    order = lengths.argsort(stable=True)
    while len(order):
        longest = int(lengths[order[-1]])
        rows = min(_ROWS, max(1, _PAIRS // max(longest, 1) ** 2))
        yield order[-rows:], longest
        order = order[:-rows]


class Ragged:
    """Captions of different lengths: all their words in one array (W,) int64, and the length of each (C,) int64."""

    def __init__(self, words: np.ndarray, lengths: np.ndarray) -> None:
        self.words, self.lengths = words, lengths

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches of captions of similar length: their numbers (R,), their padded words (R, T), their lengths (R,)."""
        starts = np.cumsum(self.lengths) - self.lengths
        for numbers, width in by_length(torch.from_numpy(self.lengths)):
            rows = numbers.numpy()
            # After the end of a caption these positions read other captions' words, which serve as padding.
            positions = starts[rows, None] + np.arange(width)
            words = self.words[np.minimum(positions, max(len(self.words) - 1, 0))] if width else positions
            yield numbers, torch.from_numpy(words), torch.from_numpy(self.lengths[rows])
