"""CIDEr-D over integer n-gram keys: no Java, no strings, on the CPU or a GPU.

CIDEr-D (Vedantam et al. 2015, the variant with clipping and a length penalty; n = 1..4, sigma = 6, times 10), equal to
the reference's Python scorer. Words are ids; an n-gram is one int64 that is unique over all n. The index over the
references is a handful of tensors: built once, kept as one safetensors file, mapped by whoever needs it. Scoring is
comparisons, look-ups and segment sums over whole batches where the index lies, in a fixed order: equal inputs give
equal bits on one machine.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

N_MAX = 4
SIGMA = 6.0
_WORD_BITS = 15
_MAX_WORDS = (1 << _WORD_BITS) - 1
_PAIRS = 1 << 20  # pairs of positions compared at a time, which stay in a processor's cache
_ROWS = 256  # captions at a time


class _Grams(NamedTuple):
    """Distinct n-grams of captions: caption number, column (see `_NgramKeys.count`), key, how often; by caption."""

    caption: Tensor
    column: Tensor
    key: Tensor
    times: Tensor


class CiderD:
    """Scores captions (word ids) of images against references, with document frequencies over the images.

    Made by `CiderD.build`; an image is known by its place among the references. About 5 kB an image with five
    references, wherever it lies (`to`); processes that `load` one file share its pages.
    """

    def __init__(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._tensors, self.facts = dict(tensors), dict(facts)
        self.num_images = int(facts["num_images"])
        self._log_documents = float(facts["log_documents"])
        self._size = int(facts["size"])
        self._vocabulary = _Table.of(self._tensors, "vocabulary")
        self._places = _Table.of(self._tensors, "places")
        prefixes = [_Table.of(self._tensors, f"prefix{order}") for order in range(1, N_MAX) if facts["wide"]]
        self._keys = _NgramKeys(int(facts["num_words"]), prefixes if facts["wide"] else None)

    @classmethod
    def build(
        cls,
        references: Sequence[Sequence[Sequence[int]]],
        *,
        caption_documents: bool = False,
        num_words: int = 0,
    ) -> CiderD:
        """The index of each image's reference captions, given as word-id sequences.

        `num_words` is above every id that captions may hold, where that is more than the references hold;
        `caption_documents` counts every caption as a document, as the meshed-memory transformer's reward does. Costs
        a few sorts of all reference n-grams.
        """
        captions = _Ragged.of([caption for image in references for caption in image])
        counts = np.array([len(image) for image in references], np.int64)
        num_words = max(num_words, int(captions.words.max(initial=0)) + 1)
        keys = _NgramKeys.build(num_words, captions)
        rows, found = [np.zeros(0, np.int64)], []
        for part, words, lengths in captions.batches():
            found.append(keys.count(words, lengths))
            rows.append(part[found[-1].caption.numpy()])
        caption = np.concatenate(rows)
        none = torch.zeros(0, dtype=torch.long)
        key = torch.cat([none, *(grams.key for grams in found)]).numpy()
        count = torch.cat([none, *(grams.times for grams in found)]).numpy()
        order = torch.cat([none, *(grams.column for grams in found)]).numpy() % N_MAX

        # Entries sorted by (image, n-gram, reference): all references of an image that hold an n-gram lie together.
        by_key = np.argsort(key)
        firsts = _beginnings(key[by_key])
        vocabulary, number = _Table.build(key[by_key[firsts]])
        place_of, size = np.empty_like(number), max(len(number), 1)
        place_of[number] = np.arange(len(number))
        dense = np.empty_like(key)
        dense[by_key] = np.repeat(place_of, np.diff(firsts, append=len(key)))
        image = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(captions)) - np.repeat(np.cumsum(counts) - counts, counts)  # of its image's references
        place, most = image[caption] * size + dense, int(counts.max(initial=1))
        by_place = np.argsort(place * most + nth[caption])
        ordered = place[by_place]
        starts = _beginnings(ordered)
        places, number = _Table.build(ordered[starts])

        # Document frequency: the number of images in whose references an n-gram stands.
        documents = dense if caption_documents else ordered[starts] % size
        frequency = np.bincount(documents, minlength=size)
        log_documents = math.log(max(len(captions) if caption_documents else len(references), 1))
        idf = log_documents - np.log(np.maximum(frequency, 1))
        weight = count * idf[dense]
        norm = np.sqrt(np.bincount(caption * N_MAX + order, weights=weight**2, minlength=len(captions) * N_MAX))
        tensors = {
            "num_references": torch.from_numpy(counts),
            "length": torch.from_numpy(np.maximum(captions.lengths - 1.0, 0.0)),
            "norm": torch.from_numpy(norm),
            "idf": torch.from_numpy(idf),
            "starts": torch.from_numpy(starts[number].astype(_smallest(len(place)))),
            "counts": torch.from_numpy(np.diff(starts, append=len(place))[number].astype(np.int32)),
            "entry_reference": torch.from_numpy(caption[by_place].astype(np.int32)),
            "entry_weight": torch.from_numpy(weight[by_place]),
            **vocabulary.named("vocabulary"),
            **places.named("places"),
        }
        for length, table in enumerate(keys.prefixes or (), 1):
            tensors |= table.named(f"prefix{length}")
        facts = {
            "num_images": len(references),
            "num_words": num_words,
            "size": size,
            "log_documents": log_documents,
            "wide": keys.prefixes is not None,
        }
        return cls(tensors, facts)

    def to(self, device: torch.device | str) -> CiderD:
        """The same index on a device."""
        return CiderD({name: tensor.to(device) for name, tensor in self._tensors.items()}, self.facts)

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """One safetensors file; `facts` (JSON values) come back in `facts`. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._tensors, path, {"facts": json.dumps({**self.facts, **facts})})
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> CiderD:
        """What `save` wrote, mapped and not read; ValueError when the file is not whole."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                names = file.keys()
                return cls({name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["facts"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a CIDEr-D index: {error}") from error

    def score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        """CIDEr-D x 10 of each caption, float64 (R,).

        captions (R, T) word ids, of which the first lengths (R,) count; images (R,) places of the references; all
        where the index lies. An n-gram that no reference has counts in the caption's norm with document frequency 1.
        Captions of like length are scored together, in parts that bound the memory.
        """
        scores = lengths.new_zeros(len(lengths), dtype=torch.float64)
        for part, width in _of_like_length(lengths):
            scores[part] = self._score(captions[part, :width], lengths[part], images[part])
        return scores

    def _score(self, captions: Tensor, lengths: Tensor, images: Tensor) -> Tensor:
        tensors = self._tensors
        grams = self._keys.count(captions, lengths)
        position, seen = self._vocabulary.find(grams.key)
        weight = grams.times * torch.where(seen, _at(tensors["idf"], position.where(seen, 0)), self._log_documents)
        squares = captions.new_zeros((len(captions), captions.shape[1] * N_MAX), dtype=torch.float64)
        squares[grams.caption, grams.column] = weight.square()
        norm = squares.view(len(captions), -1, N_MAX).sum(1).sqrt()  # (R, n)

        # Each caption n-gram that some reference of its image holds, widened to one row a reference that holds it.
        gram = seen.nonzero().squeeze(1)
        place, here = self._places.find(_at(images, _at(grams.caption, gram)) * self._size + _at(position, gram))
        gram, place = gram[here], place[here]
        starts, counts = _at(tensors["starts"], place).long(), _at(tensors["counts"], place).long()
        row = gram.repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(len(row), device=row.device) + (starts - first).repeat_interleave(counts)

        theirs = _at(tensors["entry_weight"], entry)
        product = torch.minimum(_at(weight, row), theirs) * theirs
        reference = _at(tensors["entry_reference"], entry).long()
        caption, order = _at(grams.caption, row), _at(grams.column, row) % N_MAX
        bottom = _at(norm.flatten(), caption * N_MAX + order) * _at(tensors["norm"], reference * N_MAX + order)
        delta = (_at(lengths, caption) - 1).clamp(min=0) - _at(tensors["length"], reference)
        value = product / torch.where(bottom > 0, bottom, 1.0) * torch.exp(-delta.square() / (2 * SIGMA**2))
        matched = torch.segment_reduce(
            value, "sum", lengths=torch.bincount(caption, minlength=len(captions)), initial=0
        )
        return matched / N_MAX / tensors["num_references"][images].clamp(min=1) * 10.0


class _NgramKeys:
    """n-grams as int64 keys, exact for any number of words.

    Below 2^15 words an n-gram is its words, 15 bits each, counted from 1: keys of different n differ. With more, a
    key is (number of the (n-1)-gram, word, n): the number is the prefix's place among those of the references
    (`prefixes`), or one beyond them that holds within one call of `count`, which is as far as unseen n-grams are
    compared.
    """

    def __init__(self, num_words: int, prefixes: list[_Table] | None) -> None:
        self.num_words, self.prefixes = num_words, prefixes

    @classmethod
    def build(cls, num_words: int, captions: _Ragged) -> _NgramKeys:
        keys = cls(num_words, None)
        if num_words <= _MAX_WORDS:
            return keys
        keys.prefixes = []
        for order in range(1, N_MAX):  # the (order + 1)-grams are numbered by the prefixes found before
            last = [torch.zeros(0, dtype=torch.long)]
            for _, words, lengths in captions.batches():
                grams = keys.count(words, lengths, longest=order)
                last.append(grams.key[grams.column % N_MAX == order - 1])
            keys.prefixes.append(_Table.build(_distinct(torch.cat(last).numpy()))[0])
        return keys

    def count(self, words: Tensor, lengths: Tensor, longest: int = N_MAX) -> _Grams:
        """The distinct n-grams of captions (R, T) of `lengths` (R,), n up to `longest`; column = start * 4 + n - 1.

        Positions are compared with each other, which for captions costs less than sorting them.
        """
        width = words.shape[1]
        inside = torch.arange(width, device=words.device) < lengths[:, None]
        if bool((words.ge(self.num_words) & inside).any()):
            most = int(words.masked_fill(~inside, 0).max())
            raise ValueError(f"word id {most} is not below num_words = {self.num_words}; name more words")
        # Captions last: neighbors in memory are compared side by side. What stands behind a caption is only itself.
        own = words.where(inside, -1 - torch.arange(width, device=words.device)).t().int().contiguous()  # (T, R)
        same_word = own[:, None] == own[None]  # (T, T, R)
        same, before = same_word, torch.ones_like(same_word[:, :, :1]).squeeze(2).tril(-1).unsqueeze(2)
        key, grams = torch.zeros_like(words), []
        for order in range(min(longest, width)):
            if order:  # the n-grams at i and j are equal when the (n-1)-grams are, and the words after them
                same = same[:-1, :-1] & same_word[order:, order:]
            starts = width - order
            key = self._extend(key[:, :starts], words[:, order:], inside[:, order:], order)
            earlier = (same & before[:starts, :starts]).sum(1, dtype=torch.int32)
            first = (inside[:, order:] & (earlier == 0).t()).flatten().nonzero().squeeze(1)
            times = same.sum(1, dtype=torch.int32).t().flatten()
            key_, times_ = _at(key.flatten(), first), _at(times, first)
            grams.append((first // starts, first % starts * N_MAX + order, key_, times_))
        if not grams:
            none = words.new_zeros(0)
            return _Grams(none, none, none, none.double())
        caption, column, key, times = (torch.cat(part) for part in zip(*grams, strict=True))
        by_caption = caption.argsort(stable=True)
        key, times = _at(key, by_caption), _at(times.double(), by_caption)
        return _Grams(_at(caption, by_caption), _at(column, by_caption), key, times)

    def _extend(self, prefix: Tensor, words: Tensor, inside: Tensor, order: int) -> Tensor:
        """Keys of the (order + 1)-grams from those of their first `order` words and the word after them."""
        last = words + 1
        if self.prefixes is None:
            return (prefix << _WORD_BITS) | last
        if order == 0:
            return last << 2
        table = self.prefixes[order - 1]
        number, seen = table.find(prefix[inside])
        _, unseen = torch.unique(prefix[inside][~seen], return_inverse=True)
        number[~seen] = len(table) + unseen
        key = torch.zeros_like(prefix)
        key[inside] = ((number << 30 | last[inside]) << 2) | order
        return key


@dataclass(frozen=True)
class _Table:
    """Distinct int64 keys in the order of their hash buckets, up to a key a bucket; a place is one in `keys`.

    A look-up costs two memory accesses where a binary search in millions of keys costs twenty.
    """

    keys: Tensor  # one longer than there are keys: the last is a stop, never a match
    start: Tensor

    @classmethod
    def build(cls, keys: np.ndarray) -> tuple[_Table, np.ndarray]:
        """The table, and for each place the number of its key among those given."""
        bits = max(1, len(keys).bit_length())
        own = torch.from_numpy(keys)
        buckets = _buckets(own, bits).numpy().astype(_smallest(1 << bits))
        number = np.argsort(buckets)
        start = np.zeros((1 << bits) + 1, _smallest(len(keys)))
        np.cumsum(np.bincount(buckets, minlength=1 << bits), out=start[1:])
        ordered = torch.cat([own[torch.from_numpy(number)], own.new_zeros(1)])
        return cls(ordered, torch.from_numpy(start)), number

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], name: str) -> _Table:
        return cls(tensors[f"{name}.keys"], tensors[f"{name}.start"])

    def named(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.keys": self.keys, f"{name}.start": self.start}

    def __len__(self) -> int:
        return len(self.keys) - 1

    def find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """For each value (n,) its place, and whether it is there; the place means nothing where it is not."""
        buckets = _buckets(values, (len(self.start) - 1).bit_length() - 1)
        place, end = _at(self.start, buckets).long(), _at(self.start, buckets + 1).long()
        found = (_at(self.keys, place) == values) & (place < end)
        open_ = (~found & (place + 1 < end)).nonzero().squeeze(1)
        while len(open_):
            next_ = _at(place, open_) + 1
            place[open_] = next_
            hit = _at(self.keys, next_) == _at(values, open_)
            found[open_[hit]] = True
            open_ = open_[~hit & (next_ + 1 < _at(end, open_))]
        return place, found


def _buckets(keys: Tensor, bits: int) -> Tensor:
    mixed = (
        keys * -7046029254386353131
    )  # Fibonacci hashing (2^64 / the golden ratio, as int64): the high bits are mixed
    return (mixed >> (64 - bits)) & ((1 << bits) - 1)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[index], along the first dimension; on a CPU several times faster than saying so."""
    return values.index_select(0, index)


def _smallest(limit: int) -> Any:
    """The integer type for values up to `limit`: look-ups wait for memory, and half the bytes are half the wait."""
    return np.int32 if limit < 1 << 31 else np.int64


def _distinct(values: np.ndarray) -> np.ndarray:
    ordered = np.sort(values)
    return ordered[_beginnings(ordered)]


def _beginnings(ordered: np.ndarray) -> np.ndarray:
    """Where a new value begins in sorted ones."""
    new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return np.flatnonzero(new)


def _of_like_length(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """(rows, longest length) of parts of a batch that together waste little when padded and fit in memory."""
    order = lengths.argsort(stable=True)
    ordered = lengths[order].tolist()
    end = len(ordered)
    while end:
        start = max(0, end - _ROWS, end - max(1, _PAIRS // max(ordered[end - 1], 1) ** 2))
        yield order[start:end], ordered[end - 1]
        end = start


@dataclass(frozen=True)
class _Ragged:
    """Captions one after the other: their words, and the length of each."""

    words: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, captions: Sequence[Sequence[int]]) -> _Ragged:
        lengths = np.array([len(caption) for caption in captions], np.int64)
        return cls(np.fromiter(itertools.chain.from_iterable(captions), np.int64, int(lengths.sum())), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """(numbers of the captions, their words padded (R, T), lengths (R,)), captions of like length together."""
        firsts = np.cumsum(self.lengths) - self.lengths
        for part, width in _of_like_length(torch.from_numpy(self.lengths)):
            rows = part.numpy()
            places = firsts[rows, None] + np.arange(width)
            words = self.words[np.minimum(places, max(len(self.words) - 1, 0))] if width else places
            yield rows, torch.from_numpy(words), torch.from_numpy(self.lengths[rows])
