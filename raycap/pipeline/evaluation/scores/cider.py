"""CIDEr-D over integer n-gram keys, in batches, on a CPU or a GPU.

CIDEr-D is defined in section 6 of Vedantam et al. 2015 (n = 1..4, sigma = 6, times 10); the values equal those of
coco-caption's Python scorer. Words are ids, and an n-gram is one int64 key that is unique over all n. The index of the
references is a set of tensors, saved as one safetensors file, whose memory processes share. Every sum has a fixed
order, so equal inputs give equal bits on one machine.

Shapes: I images, C reference captions, V distinct n-grams of the references, P distinct (image, n-gram) pairs,
M (reference, n-gram) entries, R scored captions, T words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SIGMA = 6.0
N_MAX = 4  # CIDEr-D uses n-grams of 1 to 4 words
_PAIRS = 1 << 20  # at most this many pairs of positions are compared at a time, to stay in a processor's cache
_ROWS = 256  # at most this many captions are compared at a time
_FIBONACCI = -7046029254386353131  # 2^64 divided by the golden ratio, as int64 (Fibonacci hashing)


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `training.rewards.cider_index.build_index` creates it. An image is identified by its position among the references.
    Processes that `load` the same file share its memory pages. `metadata` has JSON values, saved with the index.

    The index has tables of all n-grams, 16 to 32 bytes for each distinct one, and for each image its own part, about
    2.5 kB with five references. The parts are in the order of the images. So a process that maps the file and scores
    some of the images reads their parts only, and `select` copies them. A pair is one (image, n-gram); an entry of
    the index is one n-gram of one reference. Pairs are sorted by image and n-gram, and entries by pair and reference.
    The tensors of the index by name:

        reference_offset (I + 1,)    number of the first reference caption of each image; at the end C
        length (C,) float64          number of bigrams of each caption: CIDEr-D's length
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        idf (V,) float64             inverse document frequency of each n-gram
        pair_offset (I + 1,)         number of the first pair of each image; at the end P
        pair_ngram (P + 1,)          number of the n-gram of each pair; the last one only makes that position readable
        pair_bucket (P + 1,)         first pair of each bucket, see `_find_pairs`; at the end P
        pair_start (P + 1,)          position of each pair's first entry; at the end M
        entry_reference (M,)         number of the reference among those of its image
        entry_times (M,)             how often the reference contains the n-gram
        ngrams.*                     table of the keys of the V n-grams
        bigrams.*                    table of the keys of the references' 2-grams
        selected (I,) int64          after `select`: the numbers of the images, ascending

    Integers without a type above have the smallest one that suffices.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.metadata = dict(metadata)
        self._tensors = dict(tensors)
        self._log_documents = float(metadata["log_documents"])
        self._bigrams, self._ngrams = (HashTable.of(tensors, name) for name in ("bigrams", "ngrams"))

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.metadata)

    def select(self, images: Tensor, tables: CiderD | None = None) -> CiderD:
        """The index of these images (n,) int64, ascending and distinct, with the same document frequencies and scores.

        An image keeps its number. The parts of the images are copied. The tables of all n-grams are shared with this
        index, or with `tables`: an earlier selection, on whose device the new one is. Raises ValueError for an index
        that is itself a selection.
        """
        index = self._tensors
        if "selected" in index:
            raise ValueError("a part of a CIDEr-D index cannot be selected from; select from the index of all images")
        parts = [_part(index, some) for some in images.split(1 << 14)]
        own = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        pairs = own.pop("pairs")
        totals = {
            "reference_offset": own.pop("references").cumsum(0),
            "pair_offset": pairs.cumsum(0),
            "pair_start": own.pop("entries").cumsum(0),
        }
        own |= {name: F.pad(values, (1, 0)).to(index[name].dtype) for name, values in totals.items()}
        # `_part` counts the buckets of an image from its first pair.
        bucket = own["pair_bucket"] + own["pair_offset"][:-1].repeat_interleave(pairs)
        own["pair_bucket"] = torch.cat([bucket, own["pair_offset"][-1:]]).to(index["pair_bucket"].dtype)
        own["pair_ngram"] = F.pad(own["pair_ngram"], (0, 1))
        own["selected"] = images.contiguous()
        if tables is None:
            return CiderD(index | own, self.metadata)
        shared = tables._tensors
        return CiderD(shared | {name: part.to(shared["idf"].device) for name, part in own.items()}, self.metadata)

    @classmethod
    def load(cls, path: Path) -> CiderD:
        """Memory-maps an index that `build_index` wrote. Raises ValueError when the file is incomplete."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not iterable)
                return cls(tensors, json.loads(file.metadata()["metadata"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a CIDEr-D index: {error}") from error

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D of each caption on its usual scale from 0 to 10, float64 (R,).

        captions (R, T): word ids; row i has lengths[i] words and then padding. images (R,): the image of each caption,
        by its position among the references. The three tensors are on the index's device. An n-gram that no reference
        contains gets document frequency 1 and adds to the caption's norm. A caption of an image that was not selected
        (see `select`) has NaN. Captions of similar length are scored together, in parts of bounded memory.
        """
        scores = lengths.new_full((len(lengths),), math.nan, dtype=torch.float64)
        if not len(self._tensors.get("selected", lengths)):
            return scores
        for part, width in by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """The scores (R,) of one part of the captions; the arguments are those of `score`."""
        index = self._tensors
        grams = count_ngrams(captions, lengths, self._bigrams)
        ngram, in_references = self._ngrams.find(grams.key)
        # log_documents is the idf of document frequency 1. An n-gram that was not found has no valid position, so
        # position 0 is read instead.
        idf = take(index["idf"], ngram.where(in_references, 0))
        weight = grams.times * torch.where(in_references, idf, self._log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Match each n-gram of a caption with every reference of its image that contains it. Match i consists of the
        # n-gram matched_gram[i] of `grams` and the entry matched_entry[i] of the index.
        rows, known = images, None
        if "selected" in index:
            rows = torch.searchsorted(index["selected"], images).clamp(max=len(index["selected"]) - 1)
            known = take(index["selected"], rows) == images
        gram = in_references.nonzero().squeeze(1)
        pair, matches = self._find_pairs(take(rows, take(grams.caption, gram)), take(ngram, gram))
        gram, pair = gram[matches], pair[matches]
        starts = take(index["pair_start"], pair).long()
        counts = take(index["pair_start"], pair + 1).long() - starts
        matched_gram = gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each element of `gram`
        number = torch.arange(len(matched_gram), device=gram.device)
        matched_entry = number + (starts - first_match).repeat_interleave(counts)

        reference_weight = take(index["entry_times"], matched_entry) * take(idf, matched_gram)
        product = torch.minimum(take(weight, matched_gram), reference_weight) * reference_weight
        caption, order = take(grams.caption, matched_gram), take(grams.column, matched_gram) % N_MAX
        first_reference = take(index["reference_offset"], rows).long()
        reference = take(first_reference, caption) + take(index["entry_reference"], matched_entry)
        norms = take(norm.flatten(), caption * N_MAX + order) * take(index["norm"], reference * N_MAX + order)
        delta = (take(lengths, caption) - 1).clamp(min=0) - take(index["length"], reference)
        value = product / torch.where(norms > 0, norms, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        num_references = take(index["reference_offset"], rows + 1).long() - first_reference
        scores = matched / N_MAX / num_references.clamp(min=1) * 10.0
        return scores if known is None else scores.where(known, math.nan)

    def _find_pairs(self, rows: Tensor, ngram: Tensor) -> tuple[Tensor, Tensor]:
        """The pair of each n-gram (n,) and its image, given as a row of the index, and whether there is one.

        The n pairs of an image have n buckets, that of an n-gram being number * n // V. An n-gram's number comes from a
        hash, so a bucket has about one pair, and the buckets have the order of the pairs.
        """
        index = self._tensors
        offset = take(index["pair_offset"], rows).long()
        pairs = take(index["pair_offset"], rows + 1).long() - offset
        bucket = offset + ngram * pairs // max(len(self._ngrams), 1)
        position = take(index["pair_bucket"], bucket).long()
        end = take(index["pair_bucket"], bucket + (pairs > 0)).long()  # an image without n-grams has no bucket
        return find_in_buckets(index["pair_ngram"], ngram, position, end)


def _part(index: Mapping[str, Tensor], images: Tensor) -> dict[str, Tensor]:
    """The tensors of some images, with buckets that count from the first pair of their image.

    Instead of the offsets, it has the numbers of references and of pairs of each image, and of entries of each pair.
    """
    captions, references = _ranges(index["reference_offset"], images)
    pair, pairs = _ranges(index["pair_offset"], images)
    entry, entries = _ranges(index["pair_start"], pair)
    first = take(index["pair_offset"], images).repeat_interleave(pairs)
    columns = (captions[:, None] * N_MAX + torch.arange(N_MAX, device=images.device)).flatten()
    return {
        "references": references,
        "pairs": pairs,
        "entries": entries,
        "length": take(index["length"], captions),
        "norm": take(index["norm"], columns),
        "pair_ngram": take(index["pair_ngram"], pair),
        "pair_bucket": take(index["pair_bucket"], pair) - first,
        "entry_reference": take(index["entry_reference"], entry),
        "entry_times": take(index["entry_times"], entry),
    }


def _ranges(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The positions from offsets[row] to offsets[row + 1] of each row, joined, and the number of positions of each."""
    begin = take(offsets, rows).long()
    counts = take(offsets, rows + 1).long() - begin
    first = counts.cumsum(0) - counts
    total = int(counts.sum())
    return torch.arange(total, device=rows.device) + (begin - first).repeat_interleave(counts), counts


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
