"""CIDEr-D over integer n-gram keys, in batches, on a CPU or a GPU.

CIDEr-D is defined in section 6 of Vedantam et al. 2015 (n = 1..4, sigma = 6, times 10). The values here equal those of
coco-caption's Python scorer. Words are ids, and an n-gram is one int64 key that is unique over all n. The index of the
references is a set of tensors. Every sum has a fixed order, so equal inputs give equal bits on one machine.

Shapes: I images, C reference captions, V distinct n-grams of the references, P distinct (image, n-gram) pairs,
M (reference, n-gram) entries, R scored captions, T words.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SIGMA = 6.0
N_MAX = 4  # CIDEr-D uses n-grams of 1 to 4 words
_PAIRS = 1 << 20  # at most this many pairs of positions are compared at a time, so that they fit into a cache
_ROWS = 256  # at most this many captions are compared at a time
_FIBONACCI = -7046029254386353131  # 2^64 divided by the golden ratio, as int64 (Fibonacci hashing)


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `build_index` creates the object. An image's number is its position among the references. A pair is an n-gram of an
    image, and an entry is an n-gram of a reference. Pairs are sorted by image and n-gram, and entries by pair and
    reference.

    bigrams: the keys of the references' 2-grams. ngrams: the keys of their V n-grams. log_documents: the logarithm of
    the number of documents. tensors, by name:

        reference_offset (I + 1,)    number of the first reference caption of each image; at the end C
        length (C,) float64          CIDEr-D's length of each caption, which is its number of 2-grams
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        idf (V + 1,) float64         inverse document frequency of each n-gram; the last one is padding
        pair_offset (I + 1,)         number of the first pair of each image; at the end P
        pair_ngram (P + 1,)          number of the n-gram of each pair; the last one is padding
        pair_bucket (P + 1,)         first pair of each bucket, see `_find_pairs`; at the end P
        pair_start (P + 1,)          position of each pair's first entry; at the end M
        entry_reference (M,)         number of the reference among those of its image
        entry_times (M,)             how often the reference contains the n-gram

    Integers without a type above have the smallest type that suffices. Because of the padding, the position after the
    last element can be read.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], bigrams: HashTable, ngrams: HashTable, log_documents: float
    ) -> None:
        self._tensors, self._bigrams, self._ngrams = dict(tensors), bigrams, ngrams
        self.log_documents = log_documents

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes."""
        tables = (self._bigrams.keys, self._bigrams.start, self._ngrams.keys, self._ngrams.start)
        return sum(tensor.nbytes for tensor in (*self._tensors.values(), *tables))

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return CiderD(tensors, self._bigrams.to(device), self._ngrams.to(device), self.log_documents)

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D of each caption on its usual scale from 0 to 10, float64 (R,).

        captions (R, T): word ids. Row i has lengths[i] words and then padding. images (R,): the number of each
        caption's image. The three tensors are on the index's device. An n-gram that no reference contains gets document
        frequency 1 and adds to the caption's norm. Captions of similar length are scored together, in parts, which
        bounds the memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """The scores (R,) of one part of the captions. The arguments are those of `score`."""
        index = self._tensors
        grams = count_ngrams(captions, lengths, self._bigrams)
        ngram, in_references = self._ngrams.find(grams.key)
        # An n-gram that no reference contains has document frequency 1, so its idf is log_documents. The idf at
        # position 0 is read for such an n-gram, but not used.
        idf = take(index["idf"], ngram.where(in_references, 0))
        weight = grams.times * torch.where(in_references, idf, self.log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        gram = in_references.nonzero().squeeze(1)
        matched_gram, matched_entry = self._matches(gram, take(ngram, gram), take(images, take(grams.caption, gram)))
        reference_weight = take(index["entry_times"], matched_entry) * take(idf, matched_gram)
        product = torch.minimum(take(weight, matched_gram), reference_weight) * reference_weight
        caption, order = take(grams.caption, matched_gram), take(grams.column, matched_gram) % N_MAX
        first_reference = take(index["reference_offset"], images).long()
        reference = take(first_reference, caption) + take(index["entry_reference"], matched_entry)
        norms = take(norm.flatten(), caption * N_MAX + order) * take(index["norm"], reference * N_MAX + order)
        delta = (take(lengths, caption) - 1).clamp(min=0) - take(index["length"], reference)
        value = product / torch.where(norms > 0, norms, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        num_references = take(index["reference_offset"], images + 1).long() - first_reference
        return matched / N_MAX / num_references.clamp(min=1) * 10.0

    def _matches(self, gram: Tensor, ngram: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Matches n-grams of captions with every reference of their image that contains them.

        gram, ngram, images (n,): an n-gram's number in `Grams`, its number in the index, and its image. Returns the
        number in `Grams` (m,) and the entry of the index (m,) of each match.
        """
        pair, exists = self._find_pairs(images, ngram)
        found_gram, found_pair = gram[exists], pair[exists]
        starts = take(self._tensors["pair_start"], found_pair).long()
        counts = take(self._tensors["pair_start"], found_pair + 1).long() - starts
        matched_gram = found_gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each found n-gram
        number = torch.arange(len(matched_gram), device=gram.device)
        return matched_gram, number + (starts - first_match).repeat_interleave(counts)

    def _find_pairs(self, images: Tensor, ngram: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the pair of image images[i] and n-gram ngram[i]. Returns the pairs' numbers, and whether each exists.

        An image with p pairs has p buckets. The n-gram with the number i is in the bucket i * p // V. The numbers of
        n-grams come from a hash, so a bucket has about one pair. Pairs are sorted, so those of a bucket are neighbors.
        """
        index = self._tensors
        offset = take(index["pair_offset"], images).long()
        pairs = take(index["pair_offset"], images + 1).long() - offset
        bucket = offset + ngram * pairs // max(len(self._ngrams), 1)
        position = take(index["pair_bucket"], bucket).long()
        end = take(index["pair_bucket"], bucket + (pairs > 0)).long()  # an image without n-grams has no bucket
        return find_in_buckets(index["pair_ngram"], ngram, position, end)


class Grams(NamedTuple):
    """Distinct n-grams of captions, sorted by caption."""

    caption: Tensor  # index of the caption
    column: Tensor  # start * 4 + n - 1, where start is the position of the n-gram's first word
    key: Tensor  # see `_ngram_keys`
    times: Tensor  # float64, how often the caption contains the n-gram


def count_ngrams(words: Tensor, lengths: Tensor, bigrams: HashTable) -> Grams:
    """The distinct n-grams of captions. words: ids (R, T). lengths: (R,). bigrams: keys of the references' 2-grams."""
    width = words.shape[1]
    inside = torch.arange(width, device=words.device) < lengths[:, None]
    # Captions are the last dimension, so that comparisons are vectorized. Each position of padding has its own negative
    # id, so that padding equals nothing.
    padded = words.where(inside, -1 - torch.arange(width, device=words.device)).t().int().contiguous()  # (T, R)
    same_word = padded[:, None] == padded[None]  # (T, T, R); for captions this is faster than sorting
    same = same_word  # (S, S, R): True where the n-grams that start at two of the S = T - n + 1 positions are equal
    # (T, T, 1): True where the second position is before the first position
    is_before = torch.ones(width, width, dtype=torch.bool, device=words.device).tril(-1)[:, :, None]
    parts = [(words.new_zeros(0),) * 4]
    for order, key in enumerate(_ngram_keys(words, bigrams)[:width]):  # order: n - 1
        if order:  # two n-grams are equal when their (n-1)-grams and their last words are equal
            same = same[:-1, :-1] & same_word[order:, order:]
        starts = width - order  # S
        num_before = (same & is_before[:starts, :starts]).sum(1, dtype=torch.int32)  # (S, R)
        is_first = inside[:, order:] & (num_before == 0).t()  # (R, S)
        first = is_first.flatten().nonzero().squeeze(1)  # caption * S + start of the first n-gram of each kind
        times = same.sum(1, dtype=torch.int32).t().flatten()
        column = first % starts * N_MAX + order
        parts.append((first // starts, column, take(key.flatten(), first), take(times, first)))
    caption, column, keys, times = (torch.cat(part) for part in zip(*parts, strict=True))
    by_caption = caption.argsort(stable=True)
    return Grams(*(take(part, by_caption) for part in (caption, column, keys, times.double())))


def bigram_keys(first: Any, second: Any) -> Any:
    """The keys of 2-grams as `_ngram_keys` defines them. first, second: arrays or tensors of their words."""
    return (first << 30 | second) << 2 | 1


def _ngram_keys(words: Tensor, bigrams: HashTable) -> list[Tensor]:
    """The keys of the n-grams at every position: one tensor (R, T - n + 1) for each n. Word ids must be below 2^30.

    The two lowest bits of a key are n - 1. The bits above them are the word (n = 1), both words (2), the number of the
    first 2-gram and the last word (3), or the numbers of the first and the last 2-gram (4). The number of a 2-gram is
    its position in `bigrams`. If a 3-gram or 4-gram has a 2-gram that is not in `bigrams`, no reference contains it,
    and its key is -1.
    """
    pairs = bigram_keys(words[:, :-1], words[:, 1:])
    number, in_table = (part.view_as(pairs) for part in bigrams.find(pairs.flatten()))
    number = number.where(in_table, -1)
    first, last_word = number[:, :-1], words[:, 2:]
    three = ((first << 30 | last_word) << 2 | 2).where(first >= 0, -1)
    first_two, last_two = number[:, :-2], number[:, 2:]
    four = ((first_two << 30 | last_two) << 2 | 3).where((first_two >= 0) & (last_two >= 0), -1)
    return [words << 2, pairs, three, four]


@dataclass(frozen=True)
class HashTable:
    """Distinct int64 keys in the order of their `hashes`. The number of a key is its position in `keys`.

    A bucket has about one key, so a look-up takes about two memory accesses. A binary search would take twenty.
    """

    keys: Tensor  # (size + 1,). The last key is padding, so that the position after the last key can be read.
    start: Tensor  # (buckets + 1,). The position of each bucket's first key, and the end of the last bucket.

    @classmethod
    def of(cls, keys: np.ndarray) -> HashTable:
        """The table of these keys, which are distinct and in the order of their hashes."""
        bits = max(1, len(keys).bit_length())
        buckets = (hashes(keys) >> np.uint64(64 - bits)).astype(np.int64)
        start = np.searchsorted(buckets, np.arange((1 << bits) + 1)).astype(index_type(len(keys)))
        return cls(torch.from_numpy(np.append(keys, 0)), torch.from_numpy(start))

    def to(self, device: torch.device | str) -> HashTable:
        """The same table on a device."""
        return HashTable(self.keys.to(device), self.start.to(device))

    def __len__(self) -> int:
        return len(self.keys) - 1

    def find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The positions (n,) of values (n,), and whether the table has each. If not, the position is arbitrary."""
        num_buckets = len(self.start) - 1  # a power of two
        buckets = _buckets(values, num_buckets.bit_length() - 1)
        position, end = take(self.start, buckets).long(), take(self.start, buckets + 1).long()
        return find_in_buckets(self.keys, values, position, end)


def find_in_buckets(keys: Tensor, values: Tensor, position: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The positions in `keys` of values (n,), and whether each value's bucket has it.

    position, end (n,) int64: where the bucket of each value begins and ends. `position` is changed in place. `keys`
    needs one key of padding after the last bucket.
    """
    present = (take(keys, position) == values) & (position < end)
    # The numbers of the values that have not been found, and whose buckets have another key.
    pending = (~present & (position + 1 < end)).nonzero().squeeze(1)
    while len(pending):
        following = take(position, pending) + 1
        position[pending] = following
        is_hit = take(keys, following) == take(values, pending)
        present[pending] = is_hit
        pending = pending[~is_hit & (following + 1 < take(end, pending))]
    return position, present


def hashes(keys: np.ndarray) -> np.ndarray:
    """Distinct hashes (n,) uint64 of distinct keys (n,). The highest bits of a hash are the bucket in a `HashTable`.

    So keys in the order of their hashes are in the order of buckets, for any number of buckets.
    """
    return (keys * np.int64(_FIBONACCI)).view(np.uint64)


def _buckets(keys: Tensor, bits: int) -> Tensor:
    """The bucket of each key: the highest `bits` bits of its hash.

    `>>` shifts in copies of the sign bit, so a mask removes them.
    """
    return ((keys * _FIBONACCI) >> (64 - bits)) & ((1 << bits) - 1)


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index] along the first dimension. On a CPU `index_select` is several times faster than indexing."""
    return values.index_select(0, index)


def index_type(limit: int) -> Any:
    """int32 if values up to `limit` fit, else int64, because look-ups in smaller arrays are faster."""
    return np.int32 if limit < 1 << 31 else np.int64


def by_length(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Splits a batch into parts of similar length, which need little padding and bounded memory.

    Yields (row numbers, longest length) of each part, the longest captions first.
    """
    remaining = lengths.argsort(stable=True)  # row numbers
    while len(remaining):
        longest = int(lengths[remaining[-1]])
        num_rows = min(_ROWS, max(1, _PAIRS // max(longest, 1) ** 2))
        yield remaining[-num_rows:], longest
        remaining = remaining[:-num_rows]


def build_index(references: Iterable[Sequence[Sequence[int]]], *, caption_documents: bool = False) -> CiderD:
    """Builds the index of each image's reference captions, which are sequences of word ids below 2^30. Iterates once.

    For English captions of 10 words, the index takes about 0.7 kB per caption, mostly 12 bytes for each n-gram of each
    image. Building the index takes up to 3.2 kB per caption, and about 2 s of one core per 100,000 captions.

    caption_documents: if true, document frequencies count captions instead of images, as in the meshed-memory
    transformer's reward.
    """
    words, lengths, counts = _captions(references)
    bigrams = HashTable.of(_distinct(_bigrams(words, lengths))[0])
    slot, key, times = _entries(words, lengths, bigrams)
    keys, ngram = _distinct(key)
    del key  # frees 8 bytes per entry
    num_ngrams = max(len(keys), 1)
    num_documents = len(lengths) if caption_documents else len(counts)
    log_documents = math.log(max(num_documents, 1))

    # An entry is one n-gram of one caption, and a pair is one n-gram of one image.
    image_of_caption = np.repeat(np.arange(len(counts)), counts)
    order, start = _grouped(image_of_caption[slot // N_MAX] * num_ngrams + ngram)  # entries by pair
    first_entry = order[start]
    pair_image, pair_ngram = image_of_caption[slot[first_entry] // N_MAX], ngram[first_entry]

    frequency = np.bincount(ngram if caption_documents else pair_ngram, minlength=len(keys))
    idf = log_documents - np.log(np.maximum(frequency, 1))
    norm = np.sqrt(np.bincount(slot, (idf[ngram] * times) ** 2, minlength=len(lengths) * N_MAX))

    pairs = np.bincount(pair_image, minlength=len(counts))  # of each image
    first_pair = np.cumsum(pairs) - pairs
    bucket = first_pair[pair_image] + pair_ngram * pairs[pair_image] // num_ngrams  # see `_find_pairs`
    in_bucket = np.bincount(bucket, minlength=len(start))
    first_caption = np.cumsum(counts) - counts
    reference = np.arange(len(lengths)) - first_caption[image_of_caption]  # each caption's number in its image
    arrays = {
        "reference_offset": _positions(first_caption, len(lengths)),
        "length": np.maximum(lengths - 1.0, 0.0),
        "norm": norm,
        "idf": np.append(idf, 0.0),  # so that position 0 can be read if there are no n-grams
        "pair_offset": _positions(first_pair, len(start)),
        "pair_ngram": np.append(pair_ngram, 0).astype(index_type(num_ngrams)),
        "pair_bucket": _positions(np.cumsum(in_bucket) - in_bucket, len(start)),
        "pair_start": _positions(start, len(order)),
        "entry_reference": _small(reference)[slot // N_MAX][order],
        "entry_times": _small(times)[order],
    }
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return CiderD(tensors, bigrams, HashTable.of(keys), log_documents)


def _captions(references: Iterable[Sequence[Sequence[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All words (W,) of all captions, the length of each caption (C,), and each image's number of captions (I,)."""
    words, lengths, counts = array("i"), array("i"), array("i")
    for image in references:
        for caption in image:
            words.extend(caption)
            lengths.append(len(caption))
        counts.append(len(image))
    return np.array(words, np.int64), np.array(lengths, np.int64), np.array(counts, np.int64)


def _bigrams(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The keys of the 2-grams of all captions. The arguments are those of `_captions`."""
    follows = np.ones(len(words), bool)  # True where the next word belongs to the same caption
    follows[np.cumsum(lengths[lengths > 0]) - 1] = False
    first = np.flatnonzero(follows)
    return bigram_keys(words[first], words[first + 1])


def _entries(words: np.ndarray, lengths: np.ndarray, bigrams: HashTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct n-grams of each caption, sorted by caption, n and position. words, lengths: from `_captions`.

    Returns three arrays (M,): caption * 4 + n - 1, the key of the n-gram, and how often the caption contains it.
    """
    parts = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32))]
    caption_starts = np.cumsum(lengths) - lengths
    for numbers, width in by_length(torch.from_numpy(lengths)):
        rows = numbers.numpy()
        # Positions after the end of a caption point to words of other captions, which serve as padding.
        positions = np.minimum(caption_starts[rows, None] + np.arange(width), len(words) - 1)
        grams = count_ngrams(torch.from_numpy(words[positions]), torch.from_numpy(lengths[rows]), bigrams)
        slot = (take(numbers, grams.caption) * N_MAX + grams.column % N_MAX).int()
        parts.append((slot.numpy(), grams.key.numpy(), grams.times.int().numpy()))
    slots, keys, times = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(slots, kind="stable")
    return slots[order], keys[order], times[order]


def _grouped(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The stable order (n,) that sorts values (n,), and the positions in it at which each distinct value starts."""
    order = np.argsort(values, kind="stable").astype(index_type(len(values)))
    return order, np.flatnonzero(_is_first(values[order]))


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys in the order of their `hashes`, and the position of each of `keys` among them (n,) int32."""
    hashed = hashes(keys)
    order = np.argsort(hashed)
    is_first = _is_first(hashed[order])
    number = np.empty(len(keys), np.int32)
    number[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return keys[order[is_first]], number


def _is_first(values: np.ndarray) -> np.ndarray:
    """True (n,) for each of the sorted values (n,) that differs from the value before."""
    is_first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first


def _positions(starts: np.ndarray, end: int) -> np.ndarray:
    """The starts followed by the end, as int32 if the end fits, else int64."""
    return np.append(starts, end).astype(index_type(end))


def _small(values: np.ndarray) -> np.ndarray:
    """The same numbers as uint8 if all fit, else as int32."""
    return values.astype(np.uint8 if values.max(initial=0) < 256 else np.int32)
