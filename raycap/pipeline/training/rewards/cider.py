"""CIDEr-D over integer n-gram keys, in batches, on a CPU or a GPU, and the index of the reference captions.

CIDEr-D is defined in section 6 of Vedantam et al. 2015 (n = 1..4, sigma = 6, times 10); the values equal those of
coco-caption's Python scorer. Words are ids, and an n-gram is one int64 key that is unique over all n. Every sum has a
fixed order, so equal inputs give equal bits on one machine.

Of English captions of 10 words the index has about 0.7 kB per caption, mostly for each n-gram of each image.

Shapes: I images, C reference captions, V distinct n-grams of the references, P distinct (image, n-gram) pairs,
M (reference, n-gram) entries, R scored captions, T words.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

SIGMA = 6.0
N_MAX = 4  # CIDEr-D uses n-grams of 1 to 4 words
_PAIRS = 1 << 20  # at most this many pairs of positions are compared at a time, to stay in a processor's cache
_ROWS = 256  # at most this many captions are compared at a time
Words = TypeVar("Words", Tensor, np.ndarray)
_END = 2**63 - 1  # the last element of each table of keys, so that each position that `_find` gives exists


class CiderD:
    """Scores captions (word ids) of images against their references, with document frequencies over the images.

    `build_index` creates it. An image is identified by its position among the references. A pair is one (image,
    n-gram); an entry is one n-gram of one reference. log_documents: the logarithm of the number of documents.
    tensors, by name:

        reference_offset (I + 1,)    number of the first reference caption of each image; at the end C
        length (C,) float64          number of bigrams of each caption: CIDEr-D's length
        norm (C * 4,) float64        norm of the weights of each caption's n-grams of length n, at caption * 4 + n - 1
        bigram                       the keys of the references' 2-grams, ascending; at the end _END
        ngram (V + 1,)               the keys of the references' n-grams, likewise
        idf (V + 1,) float64         inverse document frequency of each n-gram
        pair (P + 1,)                image * V + number of the n-gram, ascending; at the end _END
        pair_start (P + 1,)          position of each pair's first entry; at the end M
        entry_reference (M,)         number of the reference among those of its image; entries are sorted by pair, then
                                     by reference
        entry_times (M,)             how often the reference contains the n-gram
    """

    def __init__(self, tensors: Mapping[str, Tensor], log_documents: float) -> None:
        self._tensors, self.log_documents = dict(tensors), log_documents

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.log_documents)

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D of each caption on its usual scale from 0 to 10, float64 (R,).

        captions (R, T): word ids; row i has lengths[i] words and then padding. images (R,): the image of each caption,
        by its position among the references. The three tensors are on the index's device. An n-gram that no reference
        contains gets document frequency 1 and adds to the caption's norm. Captions of similar length are scored
        together, in parts of bounded memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in _by_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """The scores (R,) of one part of the captions; the arguments are those of `score`."""
        index = self._tensors
        grams = _count_ngrams(captions, lengths, index["bigram"])
        ngram, in_references = _find(index["ngram"], grams.key)
        idf = torch.where(in_references, take(index["idf"], ngram), self.log_documents)  # that of document frequency 1
        weight = grams.times * idf
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Match each n-gram of a caption with every reference of its image that contains it. Match i consists of the
        # n-gram matched_gram[i] of `grams` and the entry matched_entry[i] of the index.
        gram = in_references.nonzero().squeeze(1)
        image = take(images, take(grams.caption, gram))
        pair, in_image = _find(index["pair"], image * (len(index["ngram"]) - 1) + take(ngram, gram))
        gram, pair = gram[in_image], pair[in_image]
        starts = take(index["pair_start"], pair).long()
        counts = take(index["pair_start"], pair + 1).long() - starts
        matched_gram = gram.repeat_interleave(counts)
        first_match = counts.cumsum(0) - counts  # the number of the first match of each element of `gram`
        number = torch.arange(len(matched_gram), device=gram.device)
        matched_entry = number + (starts - first_match).repeat_interleave(counts)

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


class Grams(NamedTuple):
    """Distinct n-grams of captions, sorted by caption."""

    caption: Tensor  # index of the caption
    column: Tensor  # start * 4 + n - 1, where start is the position of the n-gram's first word
    key: Tensor  # see `_ngram_keys`
    times: Tensor  # float64, how often the caption contains the n-gram


def _count_ngrams(words: Tensor, lengths: Tensor, bigrams: Tensor) -> Grams:
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


def _bigram_keys(first: Words, second: Words) -> Words:
    """Keys of 2-grams as `_ngram_keys` defines them, from their first and second words."""
    return (first << 30 | second) << 2 | 1


def _ngram_keys(words: Tensor, bigrams: Tensor) -> list[Tensor]:
    """Keys of the n-grams at every position, exact for up to 2^30 words: one tensor (R, T - n + 1) for each n.

    The two lowest bits of a key are n - 1. The bits above them depend on n: the word (n = 1), both words (2), the
    number of the first 2-gram and the last word (3), or the numbers of the first and the last 2-gram (4). The number of
    a 2-gram is its position in `bigrams`. A 3-gram or 4-gram with a 2-gram that is not in `bigrams` has the key -1:
    no reference contains it.
    """
    pairs = _bigram_keys(words[:, :-1], words[:, 1:])
    number, in_table = (part.view_as(pairs) for part in _find(bigrams, pairs.flatten()))
    number = number.where(in_table, -1)
    first, last = number[:, :-1], words[:, 2:]
    three = ((first << 30 | last) << 2 | 2).where(first >= 0, -1)
    first, last = number[:, :-2], number[:, 2:]
    four = ((first << 30 | last) << 2 | 3).where((first >= 0) & (last >= 0), -1)
    return [words << 2, pairs, three, four]


def _find(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (n,) of values (n,) in ascending keys that end with _END, and whether each is among them.

    The position of a value that is not among them has no meaning.
    """
    position = torch.searchsorted(keys, values)
    return position, take(keys, position) == values


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index] along the first dimension. On a CPU `index_select` is several times faster than indexing."""
    return values.index_select(0, index)


def _by_length(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Splits a batch into parts of similar length, which need little padding and bounded memory.

    Yields (row numbers, longest length) of each part, the longest captions first.
    """
    order = lengths.argsort(stable=True)
    while len(order):
        longest = int(lengths[order[-1]])
        rows = min(_ROWS, max(1, _PAIRS // max(longest, 1) ** 2))
        yield order[-rows:], longest
        order = order[:-rows]


def build_index(references: Iterable[Sequence[Sequence[int]]], *, caption_documents: bool = False) -> CiderD:
    """The index of each image's reference captions, given as word-id sequences (ids below 2^30). Iterates once.

    caption_documents: compute document frequencies over captions instead of images, as the meshed-memory transformer's
    reward does.
    """
    words, lengths, counts = _captions(references)
    follows = np.ones(len(words), bool)  # whether the next word belongs to the same caption
    follows[np.cumsum(lengths[lengths > 0]) - 1] = False
    first = np.flatnonzero(follows)
    bigrams = torch.from_numpy(np.append(np.unique(_bigram_keys(words[first], words[first + 1])), _END))
    slot, key, times = _entries(words, lengths, bigrams)
    keys, ngram = np.unique(key, return_inverse=True)
    log_documents = math.log(max(len(lengths) if caption_documents else len(counts), 1))

    image_of_caption = np.repeat(np.arange(len(counts)), counts)
    pair_of_entry = image_of_caption[slot // N_MAX] * len(keys) + ngram
    order = np.argsort(pair_of_entry, kind="stable")
    pair, start = np.unique(pair_of_entry[order], return_index=True)
    frequency = np.bincount(ngram if caption_documents else pair % max(len(keys), 1), minlength=len(keys))
    idf = log_documents - np.log(np.maximum(frequency, 1))
    first_caption = np.cumsum(counts) - counts
    reference = np.arange(len(lengths)) - first_caption[image_of_caption]  # of each caption, counted from its image's
    arrays = {
        "bigram": bigrams.numpy(),
        "reference_offset": np.append(first_caption, len(lengths)),
        "length": np.maximum(lengths - 1.0, 0.0),
        "norm": np.sqrt(np.bincount(slot, (idf[ngram] * times) ** 2, minlength=len(lengths) * N_MAX)),
        "ngram": np.append(keys, _END),
        "idf": np.append(idf, 0.0),
        "pair": np.append(pair, _END),
        "pair_start": np.append(start, len(order)),
        "entry_reference": _small(reference)[slot // N_MAX][order],
        "entry_times": _small(times)[order],
    }
    return CiderD({name: torch.from_numpy(values) for name, values in arrays.items()}, log_documents)


def _captions(references: Iterable[Sequence[Sequence[int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All words of the captions, the length of each caption (C,), and the number of captions of each image (I,)."""
    words, lengths, counts = array("i"), array("i"), array("i")
    for image in references:
        for caption in image:
            words.extend(caption)
            lengths.append(len(caption))
        counts.append(len(image))
    return np.array(words, np.int64), np.array(lengths, np.int64), np.array(counts, np.int64)


def _entries(words: np.ndarray, lengths: np.ndarray, bigrams: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct n-grams (M,) of captions, by caption, n and position: caption * 4 + n - 1; key; number of times."""
    parts = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32))]
    starts = np.cumsum(lengths) - lengths
    for numbers, width in _by_length(torch.from_numpy(lengths)):
        rows = numbers.numpy()
        # After the end of a caption these positions read other captions' words, which serve as padding.
        positions = np.minimum(starts[rows, None] + np.arange(width), max(len(words) - 1, 0))
        padded = torch.from_numpy(words[positions] if width else positions)
        grams = _count_ngrams(padded, torch.from_numpy(lengths[rows]), bigrams)
        slot = (take(numbers, grams.caption) * N_MAX + grams.column % N_MAX).int()
        parts.append((slot.numpy(), grams.key.numpy(), grams.times.int().numpy()))
    slots, keys, times = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(slots, kind="stable")
    return slots[order], keys[order], times[order]


def _small(values: np.ndarray) -> np.ndarray:
    """The same numbers, as bytes if all fit."""
    return values.astype(np.uint8 if values.max(initial=0) < 256 else np.int32)
