"""CIDEr-D over integer n-gram keys: the reward of SCST and the score of validation, without Java and without strings.

CIDEr-D (Vedantam et al. 2015, the variant with clipping and a length penalty; n = 1..4, sigma = 6, times 10), equal to
the reference's Python scorer. Words are ids; an n-gram is one int64 that is unique over all n. Counting, document
frequencies and matching are sorts, searches and segment sums over whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.text import EOS, PAD, SOS, Vocabulary

N_MAX = 4
SIGMA = 6.0
_WORD_BITS = 15
_MAX_WORDS = (1 << _WORD_BITS) - 1

Array = np.ndarray


@dataclass(frozen=True)
class _Grams:
    """Distinct n-grams of captions: caption number, key, n - 1, and how often; sorted by caption, then key."""

    caption: Array
    key: Array
    order: Array
    count: Array


class CiderD:
    """Scores captions (word ids) of images against references, with document frequencies over the images.

    `references` holds each image's reference captions as word-id sequences; an image is known by its place there.
    Building costs a few sorts of all reference n-grams and about 5 kB an image with five references, every process.
    `num_words` is above every id that captions may hold, where that is more than the references hold;
    `caption_documents` counts every caption as a document, as the meshed-memory transformer's reward does.
    """

    def __init__(
        self,
        references: Sequence[Sequence[Sequence[int]]],
        *,
        caption_documents: bool = False,
        num_words: int = 0,
    ) -> None:
        self.num_images = len(references)
        words: list[int] = []
        lengths: list[int] = []
        first = [0]
        for captions in references:
            for caption in captions:
                words.extend(caption)
                lengths.append(len(caption))
            first.append(len(lengths))
        self._first = np.array(first, np.int64)  # first reference of every image
        self._keys = _NgramKeys(max(num_words, max(words, default=0) + 1))
        image_of = np.repeat(np.arange(self.num_images), np.diff(self._first))
        grams = self._keys.count(np.array(words, np.int64), np.array(lengths, np.int64))

        # Document frequency: the number of images in whose references an n-gram stands.
        vocabulary = _distinct(grams.key)
        self._vocabulary = _Table(vocabulary)
        self._size = max(len(vocabulary), 1)
        dense, _ = self._vocabulary.find(grams.key)
        place = image_of[grams.caption] * self._size + dense
        documents = dense if caption_documents else _distinct(place) % self._size
        frequency = np.bincount(documents, minlength=self._size)
        self.log_documents = math.log(max(len(lengths) if caption_documents else self.num_images, 1))
        self._idf = self.log_documents - np.log(np.maximum(frequency, 1))

        # Entries sorted by (image, n-gram, reference): all references of an image that hold an n-gram lie together.
        weight = grams.count * self._idf[dense]
        self._norm = np.sqrt(_sum_at(grams.caption * N_MAX + grams.order, weight**2, len(lengths) * N_MAX))
        self._length = _bigrams(grams, len(lengths))
        order = np.argsort(place, kind="stable")
        self._starts = _beginnings(place[order])
        self._ends = np.append(self._starts[1:], len(place))
        self._places = _Table(place[order][self._starts])
        self._entry_reference = grams.caption[order]
        self._entry_weight = weight[order]

    def score(self, captions: Array, lengths: Array, images: Array) -> Array:
        """CIDEr-D x 10 of each caption.

        captions (R, T) word ids, of which the first lengths (R,) count; images (R,) places of the references.
        Returns float64 (R,). An n-gram that no reference has counts in the caption's norm with document frequency 1.
        """
        columns = np.arange(captions.shape[1])
        words = captions[columns < lengths[:, None]].astype(np.int64)
        grams = self._keys.count(words, lengths)
        position, seen = self._vocabulary.find(grams.key)
        weight = grams.count * np.where(seen, self._idf[position], self.log_documents)
        norm = np.sqrt(_sum_at(grams.caption * N_MAX + grams.order, weight**2, len(lengths) * N_MAX))
        length = _bigrams(grams, len(lengths))

        # Each caption n-gram that some reference of its image holds, widened to one row a reference that holds it.
        gram = np.flatnonzero(seen)
        place, here = self._places.find(images[grams.caption[gram]] * self._size + position[gram])
        gram, place = gram[here], place[here]
        starts = self._starts[place]
        counts = self._ends[place] - starts
        row = np.repeat(gram, counts)
        entry = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)

        theirs = self._entry_weight[entry]
        product = np.minimum(weight[row], theirs) * theirs
        reference = self._entry_reference[entry]
        caption, order = grams.caption[row], grams.order[row]
        bottom = norm[caption * N_MAX + order] * self._norm[reference * N_MAX + order]
        delta = length[caption] - self._length[reference]
        value = product / np.where(bottom > 0, bottom, 1.0) * np.exp(-(delta**2) / (2 * SIGMA**2))
        num_references = np.diff(self._first)[images]
        return _sum_at(caption, value, len(lengths)) / N_MAX / np.maximum(num_references, 1) * 10.0


class _NgramKeys:
    """n-grams as int64 keys, exact for any number of words.

    Below 2^15 words an n-gram is its words, 15 bits each, counted from 1: keys of different n differ. With more, a
    key is (number of the (n-1)-gram, word, n): the number is the prefix's place among those of the references, or one
    beyond them that holds within one call of `count`, which is as far as unseen n-grams are compared.
    """

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._wide = num_words > _MAX_WORDS
        self._prefixes: list[_Table] = []  # of the references; filled by the first `count`

    def count(self, words: Array, lengths: Array) -> _Grams:
        """The distinct n-grams of captions given flat: `words` of all captions, `lengths` of each."""
        if len(words) and words.max() >= self._num_words:
            raise ValueError(f"word id {words.max()} is not below num_words = {self._num_words}; name more words")
        ends = np.cumsum(lengths)
        caption = np.repeat(np.arange(len(lengths)), lengths)
        left = ends[caption] - np.arange(len(words))  # words from here to the caption's end, this one included
        keys, captions, orders = [], [], []
        key = np.zeros(len(words), np.int64)
        for order in range(N_MAX):
            start = np.flatnonzero(left > order)
            key = self._extend(key, words, start, order)
            keys.append(key[start])
            captions.append(caption[start])
            orders.append(np.full(len(start), order, np.int64))
        all_keys, all_captions, all_orders = (np.concatenate(parts) for parts in (keys, captions, orders))
        sort = np.lexsort((all_keys, all_captions))
        all_keys, all_captions, all_orders = all_keys[sort], all_captions[sort], all_orders[sort]
        begin = _beginnings(all_keys, all_captions)
        counts = np.diff(np.append(begin, len(all_keys)))
        return _Grams(all_captions[begin], all_keys[begin], all_orders[begin], counts.astype(np.float64))

    def _extend(self, prefix: Array, words: Array, start: Array, order: int) -> Array:
        """Keys of the (order + 1)-grams that begin at `start`, from those of their first `order` words."""
        key = np.zeros(len(words), np.int64)
        last = words[start + order] + 1
        if not self._wide:
            key[start] = (prefix[start] << _WORD_BITS) | last
        elif order == 0:
            key[start] = last << 2
        else:
            if len(self._prefixes) < order:
                self._prefixes.append(_Table(_distinct(prefix[start])))
            table = self._prefixes[order - 1]
            number, seen = table.find(prefix[start])
            _, unseen = np.unique(prefix[start][~seen], return_inverse=True)
            number[~seen] = len(table) + unseen
            key[start] = ((number << 30 | last) << 2) | order
        return key


class _Table:
    """Places of distinct int64 keys: keys sorted by hash bucket, half a key a bucket on average.

    A look-up costs two or three memory accesses where a binary search in millions of keys costs twenty.
    """

    def __init__(self, keys: Array) -> None:
        self._bits = max(1, len(keys).bit_length() + 1)
        buckets = self._buckets(keys)
        self._number = np.argsort(buckets, kind="stable")
        self._keys = np.append(keys[self._number], 0)  # the last is a stop, never a match: places beyond are cut off
        self._start = np.zeros((1 << self._bits) + 1, np.int64)
        np.cumsum(np.bincount(buckets, minlength=1 << self._bits), out=self._start[1:])

    def __len__(self) -> int:
        return len(self._number)

    def find(self, values: Array) -> tuple[Array, Array]:
        """For each value its place among the keys as given (0 where it is not there), and whether it is there."""
        buckets = self._buckets(values)
        place, end = self._start[buckets], self._start[buckets + 1]
        found = (self._keys[place] == values) & (place < end)
        open_ = np.flatnonzero(~found & (place + 1 < end))
        while len(open_):
            place[open_] += 1
            hit = self._keys[place[open_]] == values[open_]
            found[open_[hit]] = True
            open_ = open_[~hit & (place[open_] + 1 < end[open_])]
        number = np.zeros(len(values), np.int64)
        number[found] = self._number[place[found]]
        return number, found

    def _buckets(self, keys: Array) -> Array:
        mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the high bits are mixed
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)


def _distinct(values: Array) -> Array:
    ordered = np.sort(values)
    return ordered[_beginnings(ordered)]


def _beginnings(*columns: Array) -> Array:
    """Where a new combination begins in columns that are sorted together."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = False
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def _sum_at(places: Array, values: Array, size: int) -> Array:
    return np.bincount(places, weights=values, minlength=size)


def _bigrams(grams: _Grams, num_captions: int) -> Array:
    """Caption length as CIDEr-D's penalty measures it: the number of bigrams."""
    two = grams.order == 1
    return _sum_at(grams.caption[two], grams.count[two], num_captions)


class CaptionReward:
    """CIDEr-D of sampled token ids (SOS ... EOS PAD) against raw reference captions, under an EOS rule.

    References keep all their words, not only the model's; with `eos`, EOS is a word at the end of every reference and
    of every caption that ended: a caption cut off at the length limit misses it and is scored lower.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[str]],
        vocabulary: Vocabulary,
        *,
        eos: bool,
        caption_documents: bool = False,
    ) -> None:
        ids = dict(vocabulary.ids)
        coded = []
        for captions in references.values():
            rows = []
            for caption in captions:
                words = [word for word in vocabulary.tokenize(caption) if word.strip()] + ([EOS] if eos else [])
                rows.append([ids.setdefault(word, len(ids)) for word in words])
            coded.append(rows)
        self.place = {image: number for number, image in enumerate(references)}
        self.scorer = CiderD(coded, caption_documents=caption_documents, num_words=len(ids))
        self._coded, self._num_words = coded, len(ids)
        self.eos, self.eos_id = eos, vocabulary.eos
        blank = [vocabulary.ids[special] for special in (PAD, SOS)]
        blank += [number for word, number in vocabulary.ids.items() if not word.strip()]  # a newline is no word here
        self._dropped = np.array(blank)

    def ground_truth(self, most: int = 1000) -> tuple[float, float] | None:
        """Mean score of references against their image's other references, and of the same without their EOS.

        What SCST climbs towards: far above 0, and not the same without EOS when EOS is in the reward, or the setting
        is broken. Over at most `most` images that have two captions or more; None when there is none.
        """
        chosen = [place for place, captions in enumerate(self._coded) if len(captions) > 1][:most]
        if not chosen:
            return None
        others = CiderD([self._coded[place][1:] for place in chosen], num_words=self._num_words)
        first = [self._coded[place][0] for place in chosen]
        width = max(map(len, first))
        rows = np.array([words + [0] * (width - len(words)) for words in first])
        lengths = np.array([len(words) for words in first])
        places = np.arange(len(chosen))
        cut = others.score(rows, np.maximum(lengths - self.eos, 0), places)
        return float(others.score(rows, lengths, places).mean()), float(cut.mean())

    def __call__(self, tokens: Array, images: Sequence[int]) -> Array:
        """CIDEr-D x 10 (R,) of tokens (R, T); what stands after the first EOS is ignored. `images` are image ids."""
        after = np.cumsum(tokens == self.eos_id, 1) - (tokens == self.eos_id)
        keep = (after == 0) & ~np.isin(tokens, self._dropped)
        if not self.eos:
            keep &= tokens != self.eos_id
        order = np.argsort(~keep, axis=1, kind="stable")  # kept words to the front, in their order
        places = np.array([self.place[int(image)] for image in images])
        return self.scorer.score(np.take_along_axis(tokens, order, 1), keep.sum(1), places)
