"""Builds the index of CIDEr-D from the reference captions of all images, in memory.

Of English captions of 10 words the index has about 0.7 kB per caption, mostly 12 bytes for each n-gram of each image.
Building it takes up to 3.2 kB per caption, and about 2 s of one core per 100,000.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from raycap.pipeline.training.rewards.cider import (
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


def build_index(references: Iterable[Sequence[Sequence[int]]], *, caption_documents: bool = False) -> CiderD:
    """The index of each image's reference captions, given as word-id sequences (ids below 2^30). Iterates once.

    caption_documents: compute document frequencies over captions instead of images, as the meshed-memory transformer's
    reward does.
    """
    captions, counts = _captions(references)
    lengths = captions.lengths
    bigrams = HashTable.of(_distinct(_bigrams(captions))[0])
    slot, key, times = _entries(captions, bigrams)
    keys, ngram = _distinct(key)
    del key
    num_ngrams = max(len(keys), 1)
    log_documents = math.log(max(len(lengths) if caption_documents else len(counts), 1))

    # An entry is one n-gram of one caption, and a pair is one n-gram of one image.
    image_of_caption = np.repeat(np.arange(len(counts)), counts)
    pair = image_of_caption[slot // N_MAX] * num_ngrams + ngram
    order = np.argsort(pair, kind="stable").astype(index_type(len(pair)))
    pair = pair[order]
    start = np.flatnonzero(_is_first(pair))  # the first entry of each pair in this order
    pair_image, pair_ngram = np.divmod(pair[start], num_ngrams)
    del pair

    frequency = np.bincount(ngram if caption_documents else pair_ngram, minlength=len(keys))
    idf = log_documents - np.log(np.maximum(frequency, 1))
    norm = np.sqrt(np.bincount(slot, (idf[ngram] * times) ** 2, minlength=len(lengths) * N_MAX))
    del ngram

    pairs = np.bincount(pair_image, minlength=len(counts))
    first_pair = np.cumsum(pairs) - pairs
    bucket = first_pair[pair_image] + pair_ngram * pairs[pair_image] // num_ngrams
    in_bucket = np.bincount(bucket, minlength=len(start))
    first_caption = np.cumsum(counts) - counts
    reference = np.arange(len(lengths)) - first_caption[image_of_caption]  # of each caption, counted from its image's
    arrays = {
        "reference_offset": _positions(first_caption, len(lengths)),
        "length": np.maximum(lengths - 1.0, 0.0),
        "norm": norm,
        "idf": np.append(idf, 0.0),  # makes position 0 readable if there is no n-gram
        "pair_offset": _positions(first_pair, len(start)),
        "pair_ngram": np.append(pair_ngram, 0).astype(index_type(num_ngrams)),
        "pair_bucket": _positions(np.cumsum(in_bucket) - in_bucket, len(start)),
        "pair_start": _positions(start, len(order)),
        "entry_reference": _small(reference)[slot // N_MAX][order],
        "entry_times": _small(times)[order],
    }
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return CiderD(tensors, bigrams, HashTable.of(keys), log_documents)


def _captions(references: Iterable[Sequence[Sequence[int]]]) -> tuple[Ragged, np.ndarray]:
    """The captions of all images, and the number of captions of each image (I,) int64."""
    words, lengths, counts = array("i"), array("i"), array("i")
    for image in references:
        for caption in image:
            words.extend(caption)
            lengths.append(len(caption))
        counts.append(len(image))
    return Ragged(np.array(words, np.int64), np.array(lengths, np.int64)), np.array(counts, np.int64)


def _bigrams(captions: Ragged) -> np.ndarray:
    """The keys of the 2-grams of all captions."""
    follows = np.ones(len(captions.words), bool)  # whether the next word belongs to the same caption
    follows[np.cumsum(captions.lengths[captions.lengths > 0]) - 1] = False
    first = np.flatnonzero(follows)
    return bigram_keys(captions.words[first], captions.words[first + 1])


def _entries(captions: Ragged, bigrams: HashTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct n-grams (M,) of captions, by caption, n and position: caption * 4 + n - 1; key; number of times."""
    parts = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32))]
    for numbers, words, lengths in captions.batches():
        grams = count_ngrams(words, lengths, bigrams)
        slot = (take(numbers, grams.caption) * N_MAX + grams.column % N_MAX).int()
        parts.append((slot.numpy(), grams.key.numpy(), grams.times.int().numpy()))
    slots, keys, times = zip(*parts, strict=True)
    order = np.argsort(np.concatenate(slots), kind="stable")
    return np.concatenate(slots)[order], np.concatenate(keys)[order], np.concatenate(times)[order]


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys in the order of `hashes`, and the position in them of each key (n,) int32."""
    hashed = hashes(keys)
    order = np.argsort(hashed)
    is_first = _is_first(hashed[order])
    number = np.empty(len(keys), np.int32)
    number[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return keys[order[is_first]], number


def _is_first(values: np.ndarray) -> np.ndarray:
    """Whether each of the sorted values (n,) differs from the one before."""
    is_first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first


def _positions(starts: np.ndarray, end: int) -> np.ndarray:
    """These starts and the end, as the smallest integers that suffice."""
    return np.append(starts, end).astype(index_type(end))


def _small(values: np.ndarray) -> np.ndarray:
    """The same numbers, as bytes if all fit."""
    return values.astype(np.uint8 if values.max(initial=0) < 256 else np.int32)
