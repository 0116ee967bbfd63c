"""The rows of names, in memory-mapped arrays: a dict of a hundred million names would not fit in memory."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

from raycap.pipeline.storage.tables import spilled_zeros

FIRST_SLOTS = 2**12
_MAX_SHARE = 2 / 3  # of the slots that are in use
_REHASHED = 2**20  # slots that are moved at a time


class NameIndex:
    """A number below 2**32 - 1 for each name: a hash table of 20 bytes per slot, memory-mapped when it is large.

    Names are compared by 128 bits of a hash, which no two names share in practice.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make(FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def _make(self, slots: int) -> None:
        """Makes empty slots."""
        self._arrays = (
            spilled_zeros((slots,), np.uint64),  # the first half of the hash, which also selects the slot
            spilled_zeros((slots,), np.uint64),  # the second half
            spilled_zeros((slots,), np.uint32),  # the number + 1; 0 for a slot that is not in use
        )
        # reading a number from a view takes a third of the time of reading it from an array
        self._first, self._second, self._numbers = (array.data for array in self._arrays)
        self._mask = slots - 1

    def setdefault(self, name: str, number: int) -> int:
        """The number of a name; this one if the name is new."""
        slot, first, second = self._find(name)
        if found := self._numbers[slot]:
            return found - 1
        self._first[slot], self._second[slot], self._numbers[slot] = first, second, number + 1
        self._count += 1
        if self._count > _MAX_SHARE * len(self._numbers):
            self._grow()
        return number

    def __contains__(self, name: str) -> bool:
        return bool(self._numbers[self._find(name)[0]])

    def _find(self, name: str) -> tuple[int, int, int]:
        """The slot of a name, or the free one that it would take, and the halves of its hash."""
        first, second = struct.unpack("=QQ", blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest())
        slot = first & self._mask
        while self._numbers[slot] and (self._first[slot] != first or self._second[slot] != second):
            slot = (slot + 1) & self._mask
        return slot, first, second

    def _grow(self) -> None:
        """Moves the names to twice as many slots."""
        old = self._arrays
        self._make(2 * len(old[0]))
        for start in range(0, len(old[0]), _REHASHED):
            used = start + np.flatnonzero(old[2][start : start + _REHASHED])
            slots = (old[0][used] & np.uint64(self._mask)).astype(np.int64)
            # in each round the first name that needs a free slot takes it; the others try the next one
            while len(used):
                _, is_first = np.unique(slots, return_index=True)
                taken = is_first[self._arrays[2][slots[is_first]] == 0]
                for array, values in zip(self._arrays, old, strict=True):
                    array[slots[taken]] = values[used[taken]]
                used, slots = np.delete(used, taken), (np.delete(slots, taken) + 1) & self._mask
