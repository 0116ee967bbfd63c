"""The order of samples: a permutation that depends on seed and epoch, computed position by position.

It is a keyed Feistel network over the next power of four, with cycle walking for values outside the data set. It needs
no table: position 10 billion costs the same as position 0, and workers do not have to communicate.
"""

from __future__ import annotations

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


def _permute(values: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The number to which a permutation of 0 to size - 1 maps each of the values. The seed decides the permutation."""
    shift = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(seed))
    permuted = _feistel(values, shift, keys)
    outside = np.flatnonzero(permuted >= size)
    while len(outside):  # cycle walking: repeated application ends inside [0, size), and remains a bijection
        again = _feistel(permuted[outside], shift, keys)
        permuted[outside] = again
        outside = outside[again >= size]
    return permuted


def _feistel(values: np.ndarray, shift: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Maps numbers of twice `shift` bits to each other, one to one, in one Feistel round per key."""
    mask = (np.uint64(1) << shift) - np.uint64(1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << shift) | right
