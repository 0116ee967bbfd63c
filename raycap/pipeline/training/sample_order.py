"""The orders of samples: permutations that depend on seed and epoch, computed position by position.

All are made of keyed Feistel networks over the next power of four, with cycle walking for values outside the data set.
`samples_at` is a permutation of the samples. It needs no table: position 10 billion costs the same as position 0, and
workers do not have to communicate. `ShardOrder` is a permutation of shards, for stores that no disk holds as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 values that look random: splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """One 63-bit seed from several numbers (run seed, stage, step, rank, ...)."""
    state = np.array([0x9E3779B97F4A7C15], np.uint64)  # the increment of splitmix64
    for part in parts:
        state = mix(state ^ np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64))  # the mask makes the number unsigned
    return int(state[0] >> np.uint64(1))


def samples_at(positions: np.ndarray, num_samples: int, seed: int) -> np.ndarray:
    """Sample numbers at global positions (int64, any shape). Position p belongs to epoch p // num_samples.

    Every epoch contains every sample once, in another order. The expected cost is O(len(positions)).
    """
    epochs, offsets = np.divmod(np.asarray(positions, np.int64), num_samples)
    result = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        permuted = _permute(offsets[mask].astype(np.uint64), num_samples, seed_of(seed, int(epoch)))
        result[mask] = permuted.astype(np.int64)
    return result


def view_seeds(images: np.ndarray, epochs: np.ndarray, seed: int) -> np.ndarray:
    """The seeds (S,) uint64 that decide the views of images in epochs, both (S,) whole numbers."""
    seeds = np.empty(len(images), np.uint64)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        # 2: unlike the seeds of `samples_at`
        seeds[mask] = mix(images[mask].astype(np.uint64) ^ np.uint64(seed_of(seed, int(epoch), 2)))
    return seeds


@dataclass(frozen=True)
class _Shares:
    """How W workers share each batch of B. Position p is number `index[p % B]` of those of worker `owner[p % B]`.

    counts (W,): the samples of each worker in a batch.
    """

    owner: np.ndarray
    index: np.ndarray
    counts: np.ndarray

    def before(self, position: int) -> np.ndarray:
        """How many of the positions before this one each worker has: (W,) int64."""
        batches, rest = divmod(position, len(self.owner))
        return batches * self.counts + np.bincount(self.owner[:rest], minlength=len(self.counts))


@dataclass(frozen=True)
class _Epoch:
    """The line of an epoch: all its samples, shard after shard. Each worker has a part of it.

    shards (S,): the numbers of the shards as they follow each other. starts (S + 1,): where they begin in the line.
    parts (W + 1,): where the workers' parts begin. first (W,): the positions of each worker in earlier epochs.
    windows (W,): the samples of a window in each part.
    """

    shards: np.ndarray
    starts: np.ndarray
    parts: np.ndarray
    first: np.ndarray
    windows: np.ndarray
    shares: _Shares
    seed: int


class ShardOrder:
    """An order that reads shards one after another: each epoch is a permutation of shards and a bounded shuffle.

    The samples are numbered shard by shard. Seed and epoch decide the order of the shards, which are laid out in a line
    and cut into one part per worker, with as many samples as the worker has in the epoch's batches. Workers thus read
    disjoint shards, except the W - 1 at the cuts. A part is shuffled in three steps: within each shard, within windows
    of w consecutive samples, and within windows that are shifted by w / 2. At any time a worker reads samples from 2 w
    consecutive ones of its part, and hence from at most N shards, the largest number that overlaps 2 w consecutive
    samples: for equal shards of m samples, N = ceil((2 w - 1) / m) + 1. The parameter `buffer` is 2 w as a share of
    the part.

    W is the world size with which the epoch began (`worlds`). Other workers may continue it in the same order. Each of
    them then reads shards of several parts. It takes 24 bytes per shard and epoch in use, and 1 s per million shards at
    the beginning of an epoch. The cost of a position does not depend on the data's size except for a binary search.
    """

    def __init__(self, sizes: np.ndarray, batch_size: int, accumulation_steps: int, buffer: float, seed: int) -> None:
        """sizes (S,): the samples of each shard. accumulation_steps: per batch. buffer: above 0, at most 1."""
        self.begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.sizes, self.num_samples = np.asarray(sizes, np.int64), int(self.begins[-1])
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.buffer, self.seed = buffer, seed
        self._shares = lru_cache(maxsize=4)(self._make_shares)
        self._epoch = lru_cache(maxsize=3)(self._make_epoch)  # that of the current step, the next, and of reading ahead

    def samples_at(self, positions: np.ndarray, worlds: Callable[[int], int]) -> np.ndarray:
        """The sample numbers at global positions (P,) int64. worlds: the world size with which an epoch began."""
        result = np.empty(len(positions), np.int64)
        for number in np.unique(positions // self.num_samples).tolist():
            mask = positions // self.num_samples == number
            epoch = self._epoch(number, worlds(number))
            parts, indices = self._places(epoch, positions[mask])
            indices = _shuffled(indices, parts, epoch)
            line = epoch.parts[parts] + indices
            places = np.searchsorted(epoch.starts, line, "right") - 1
            shards = epoch.shards[places]
            seeds = mix(shards.astype(np.uint64) ^ np.uint64(seed_of(epoch.seed, 3)))
            offsets = _permute((line - epoch.starts[places]).astype(np.uint64), self.sizes[shards], seeds)
            result[mask] = self.begins[shards] + offsets.astype(np.int64)
        return result

    def shards_at(self, positions: np.ndarray, worlds: Callable[[int], int]) -> np.ndarray:
        """The numbers of all shards from which a worker with these positions of one step reads now, in reading order.

        A shard that a later step of the epoch does not contain is not read again in the epoch by this worker.
        """
        found = []
        for number in np.unique(positions // self.num_samples).tolist():
            epoch = self._epoch(number, worlds(number))
            parts, indices = self._places(epoch, positions[positions // self.num_samples == number])
            for part in np.unique(parts).tolist():
                of_part, window = indices[parts == part], int(epoch.windows[part])
                shifted = (np.array([of_part.min(), of_part.max()]) + window // 2) // window
                low, high = max(0, int(shifted[0] - 1) * window), int(shifted[1] + 1) * window
                line = epoch.parts[part] + np.array(
                    [low, min(high, int(epoch.parts[part + 1] - epoch.parts[part])) - 1]
                )
                first, last = np.searchsorted(epoch.starts, line, "right") - 1
                found.append(epoch.shards[first : last + 1])
        return np.array(list(dict.fromkeys(np.concatenate(found).tolist())), np.int64)

    def table_bytes(self) -> int:
        """The size of the tables that hold one number or more for each shard."""
        return int(self.begins.nbytes + self.sizes.nbytes + self._epoch.cache_info().currsize * self.begins.nbytes * 2)

    def _places(self, epoch: _Epoch, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts to which global positions of an epoch belong, and their numbers within these."""
        shares, (batches, rest) = epoch.shares, np.divmod(positions, self.batch_size)
        parts = shares.owner[rest]
        return parts, batches * shares.counts[parts] + shares.index[rest] - epoch.first[parts]

    def _make_shares(self, world_size: int) -> _Shares:
        count = world_size * self.accumulation_steps
        edges = np.arange(count + 1) * self.batch_size // count  # as `pipeline.training.batches.share` has them
        owner = np.repeat(np.arange(count) % world_size, np.diff(edges))
        counts, by_owner = np.bincount(owner, minlength=world_size), np.argsort(owner, kind="stable")
        index = np.empty_like(owner)
        index[by_owner] = np.arange(self.batch_size) - np.repeat(np.cumsum(counts) - counts, counts)
        return _Shares(owner, index, counts)

    def _make_epoch(self, number: int, world_size: int) -> _Epoch:
        seed = seed_of(self.seed, number)
        shards = _permute(np.arange(len(self.sizes), dtype=np.uint64), len(self.sizes), seed).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(self.sizes[shards])])
        shares = self._shares(world_size)
        first = shares.before(number * self.num_samples)
        lengths = shares.before((number + 1) * self.num_samples) - first
        windows = np.maximum(1, np.floor(self.buffer * lengths / 2)).astype(np.int64)
        return _Epoch(shards, starts, np.concatenate([[0], np.cumsum(lengths)]), first, windows, shares, seed)


class ShardSamples:
    """The samples of a data set, numbered shard by shard as `ShardOrder` has them.

    The shards get new numbers, in the order in which the data set's images name them first. `shards` (S,) has their
    numbers in the store, `sizes` (S,) their numbers of samples. Where images of a shard follow each other in the data
    set, as after one extraction, no table is needed. Otherwise there are two of 8 bytes per image.
    """

    def __init__(self, image_shards: np.ndarray, first_captions: np.ndarray | None) -> None:
        """image_shards (I,): of each image, the number of its shard in the store. first_captions (I + 1,): of each
        image, its first caption, if a sample is a caption; None if it is an image.
        """
        named, first_images, numbers = np.unique(image_shards, return_index=True, return_inverse=True)
        by_name = np.argsort(first_images)
        self.shards, numbers = named[by_name], np.argsort(by_name)[numbers]
        counts = np.ones(len(numbers), np.int64) if first_captions is None else np.diff(first_captions)
        self.sizes = np.bincount(numbers, counts, minlength=len(named)).astype(np.int64)
        self._images = self._starts = self._first = None
        if (np.diff(numbers) < 0).any():
            self._images, self._first = np.argsort(numbers, kind="stable"), first_captions
            self._starts = None if first_captions is None else np.cumsum([0, *counts[self._images]])

    def samples(self, numbers: np.ndarray) -> np.ndarray:
        """The images or captions with these numbers."""
        if self._images is None:
            return numbers
        if self._starts is None or self._first is None:
            return self._images[numbers]
        places = np.searchsorted(self._starts, numbers, "right") - 1
        return self._first[self._images[places]] + numbers - self._starts[places]


def _shuffled(indices: np.ndarray, parts: np.ndarray, epoch: _Epoch) -> np.ndarray:
    """The indices in the unshuffled parts of the samples with these indices in the shuffled ones."""
    windows, lengths = epoch.windows[parts], np.diff(epoch.parts)[parts]
    for number, shift in ((2, windows // 2), (1, 0)):
        first = (indices + shift) // windows * windows - shift
        begin, end = np.maximum(first, 0), np.minimum(first + windows, lengths)
        places = (epoch.parts[parts] + begin).astype(np.uint64)  # of the windows in the line: no two have the same
        seeds = mix(places ^ np.uint64(seed_of(epoch.seed, number)))
        indices = begin + _permute((indices - begin).astype(np.uint64), end - begin, seeds).astype(np.int64)
    return indices


def _permute(values: np.ndarray, size: int | np.ndarray, seed: int | np.ndarray) -> np.ndarray:
    """The number to which a permutation of 0 to size - 1 maps each of the values. The seed decides the permutation.

    size, seed: one for all values, or one for each.
    """
    sizes = np.broadcast_to(np.asarray(size, np.uint64), values.shape)
    num_bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]  # exact below 2**53
    shift = np.maximum(1, (num_bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << shift) - np.uint64(1)
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    keys = np.broadcast_to(mix(rounds + np.asarray(seed, np.uint64)), (_ROUNDS, len(values)))
    permuted = _feistel(values, shift, mask, keys)
    outside = np.flatnonzero(permuted >= sizes)
    while len(outside):  # cycle walking: repeated application ends inside [0, size), and remains a bijection
        again = _feistel(permuted[outside], shift[outside], mask[outside], keys[:, outside])
        permuted[outside] = again
        outside = outside[again >= sizes[outside]]
    return permuted


def _feistel(values: np.ndarray, shift: np.ndarray, mask: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Maps numbers of twice `shift` bits to each other, one to one, in one Feistel round per row of keys (R, V).

    mask: has the lowest `shift` bits set.
    """
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << shift) | right
