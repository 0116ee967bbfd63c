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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SIGMA = 6.0
N_MAX = 4  # CIDEr-D uses n-grams of 1 to 4 words
_PAIRS = 1 << 20  # at most this many pairs of positions are compared at a time, so that they fit into a cache
_ROWS = 256  # at most this many captions are compared at a time


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `build_index` creates the object. An image's number is its position among the references. A pair is an n-gram of an
    image, and an entry is an n-gram of a reference. Pairs are sorted by image and n-gram, and entries by pair and
    reference. log_documents: the logarithm of the number of documents. tensors, by name:

        reference_offset (I + 1,)    number of the first reference caption of each image; at the end C
        length (C,) float64          CIDEr-D's length of each caption, which is its number of 2-grams
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        bigram (B + 1,) int64        the keys of the references' 2-grams, for `find`
        ngram (V + 1,) int64         the keys of all n-grams, for `find`
        idf (V + 1,) float64         inverse document frequency of each n-gram; the last one is padding
        pair (P + 1,) int64          image * V + number of the n-gram of each pair, for `find`
        pair_start (P + 1,)          position of each pair's first entry; at the end M
        entry_reference (M,)         number of the reference among those of its image
        entry_times (M,)             how often the reference contains the n-gram

    Integers without a type above have the smallest type that suffices. Because of the padding, the position after the
    last element can be read.
    """

    def __init__(self, tensors: Mapping[str, Tensor], log_documents: float) -> None:
        self._tensors, self.log_documents = dict(tensors), log_documents

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.log_documents)

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
        grams = count_ngrams(captions, lengths, index["bigram"])
        ngram, in_references = find(index["ngram"], grams.key)
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
        pair, exists = find(self._tensors["pair"], images * max(len(self._tensors["ngram"]) - 1, 1) + ngram)
        found_gram, found_pair = gram[exists], pair[exists]
        starts = take(self._tensors["pair_start"], found_pair).long()
        counts = take(self._tensors["pair_start"], found_pair + 1).long() - starts
        matched_gram = found_gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each found n-gram
        number = torch.arange(len(matched_gram), device=gram.device)
        return matched_gram, number + (starts - first_match).repeat_interleave(counts)


class Grams(NamedTuple):
    """Distinct n-grams of captions, sorted by caption."""

    caption: Tensor  # index of the caption
    column: Tensor  # start * 4 + n - 1, where start is the position of the n-gram's first word
    key: Tensor  # see `_ngram_keys`
    times: Tensor  # float64, how often the caption contains the n-gram


def count_ngrams(words: Tensor, lengths: Tensor, bigrams: Tensor) -> Grams:
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


def _ngram_keys(words: Tensor, bigrams: Tensor) -> list[Tensor]:
    """The keys of the n-grams at every position: one tensor (R, T - n + 1) for each n. Word ids must be below 2^30.

    The two lowest bits of a key are n - 1. The bits above them are the word (n = 1), both words (2), the number of the
    first 2-gram and the last word (3), or the numbers of the first and the last 2-gram (4). The number of a 2-gram is
    its position in `bigrams`. If a 3-gram or 4-gram has a 2-gram that is not in `bigrams`, no reference contains it,
    and its key is -1.
    """
    pairs = bigram_keys(words[:, :-1], words[:, 1:])
    number, in_table = (part.view_as(pairs) for part in find(bigrams, pairs.flatten()))
    number = number.where(in_table, -1)
    first, last_word = number[:, :-1], words[:, 2:]
    three = ((first << 30 | last_word) << 2 | 2).where(first >= 0, -1)
    first_two, last_two = number[:, :-2], number[:, 2:]
    four = ((first_two << 30 | last_two) << 2 | 3).where((first_two >= 0) & (last_two >= 0), -1)
    return [words << 2, pairs, three, four]


def find(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The positions (n,) of values (n,) in the result of `searchable`, and whether each is there.

    If a value is not there, its position is that of another key or of the padding.
    """
    position = torch.searchsorted(keys, values)
    return position, take(keys, position) == values


def searchable(keys: np.ndarray) -> Tensor:
    """Distinct sorted keys (n,) for `find`, with a largest key as padding, so that every position can be read."""
    return torch.from_numpy(np.append(keys, np.iinfo(np.int64).max))


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
    bigrams = searchable(np.unique(_bigrams(words, lengths)))
    slot, key, times = _entries(words, lengths, bigrams)
    keys, ngram = np.unique(key, return_inverse=True)
    del key  # frees 8 bytes per entry
    num_ngrams = max(len(keys), 1)
    num_documents = len(lengths) if caption_documents else len(counts)
    log_documents = math.log(max(num_documents, 1))

    # An entry is one n-gram of one caption, and a pair is one n-gram of one image.
    image_of_caption = np.repeat(np.arange(len(counts)), counts)
    pair_of_entry = image_of_caption[slot // N_MAX] * num_ngrams + ngram
    order = np.argsort(pair_of_entry, kind="stable").astype(index_type(len(pair_of_entry)))  # entries by pair
    pair, start = np.unique(pair_of_entry[order], return_index=True)
    frequency = np.bincount(ngram if caption_documents else pair % num_ngrams, minlength=len(keys))
    idf = log_documents - np.log(np.maximum(frequency, 1))
    norm = np.sqrt(np.bincount(slot, (idf[ngram] * times) ** 2, minlength=len(lengths) * N_MAX))

    first_caption = np.cumsum(counts) - counts
    reference = np.arange(len(lengths)) - first_caption[image_of_caption]  # each caption's number in its image
    arrays = {
        "reference_offset": _positions(first_caption, len(lengths)),
        "length": np.maximum(lengths - 1.0, 0.0),
        "norm": norm,
        "idf": np.append(idf, 0.0),  # so that position 0 can be read if there are no n-grams
        "pair_start": _positions(start, len(order)),
        "entry_reference": _small(reference)[slot // N_MAX][order],
        "entry_times": _small(times)[order],
    }
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    tensors |= {"bigram": bigrams, "ngram": searchable(keys), "pair": searchable(pair)}
    return CiderD(tensors, log_documents)


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


def _entries(words: np.ndarray, lengths: np.ndarray, bigrams: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def _positions(starts: np.ndarray, end: int) -> np.ndarray:
    """The starts followed by the end, as int32 if the end fits, else int64."""
    return np.append(starts, end).astype(index_type(end))


def _small(values: np.ndarray) -> np.ndarray:
    """The same numbers as uint8 if all fit, else as int32."""
    return values.astype(np.uint8 if values.max(initial=0) < 256 else np.int32)
