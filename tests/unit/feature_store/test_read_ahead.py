"""Shards are in the cache before training reads them, never more than the budget, and leave after their last use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.pipeline.features.store.shards import ReadAhead

SIZE = 10


class Maps:
    """Records which shards are held. `before` is called before each copy."""

    def __init__(self, count: int, before: Callable[[int], bool] = lambda _: True) -> None:
        self.infos = [SimpleNamespace(bytes=SIZE)] * count
        self.before, self.held, self.most, self.copies = before, set[int](), 0, list[int]()
        self.lock = threading.Lock()

    def hold(self, shard: int) -> bool:
        if not self.before(shard):
            return False
        with self.lock:
            assert shard not in self.held
            self.held.add(shard)
            self.copies.append(shard)
            self.most = max(self.most, len(self.held))
        return True

    def let_go(self, shard: int) -> None:
        with self.lock:
            self.held.discard(shard)


def ahead(maps: Maps, steps: list[list[int]], budget: int) -> ReadAhead:
    def shards_at(step: int) -> np.ndarray:
        return np.array(steps[step], np.int64)

    return ReadAhead(cast(Any, maps), shards_at, 0, len(steps), budget * SIZE)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 3), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_shards_are_held_for_their_steps_within_the_budget(widths: list[int], stride: int, budget: int) -> None:
    """Each step needs consecutive shards, as in an epoch."""
    starts = np.cumsum([0, *[min(stride, width) for width in widths[:-1]]]).tolist()
    ends = np.maximum.accumulate(np.add(starts, widths)).tolist()
    steps = [list(range(start, end)) for start, end in zip(starts, ends, strict=True)]
    maps = Maps(200)
    with ahead(maps, steps, budget) as reader:
        for step, needed in enumerate(steps):
            reader.reach(step)
            held = set(maps.held)
            if len(needed) <= budget:
                assert held >= set(needed)
            assert all(shard >= needed[0] for shard in held), "earlier ones have been let go"
    assert maps.most <= budget and not maps.held
    if max(map(len, steps)) <= budget:
        assert maps.copies.count(0) == 1 and len(set(maps.copies)) == len(maps.copies) == len(
            {shard for step in steps for shard in step}
        )


def test_shards_of_later_steps_are_copied_before_training_reaches_them() -> None:
    copied = threading.Semaphore(0)
    maps = Maps(10, lambda _: copied.release() is None)
    with ahead(maps, [[number] for number in range(10)], budget=4) as reader:
        for _ in range(4):
            assert copied.acquire(timeout=60)
        reader.reach(2)  # makes room for two more
        for _ in range(2):
            assert copied.acquire(timeout=60)
        assert not copied.acquire(blocking=False)
    assert maps.copies == [0, 1, 2, 3, 4, 5]


def test_a_shard_that_the_next_epoch_needs_again_is_held_again() -> None:
    maps = Maps(3)
    with ahead(maps, [[0], [1], [2], [0]], budget=2) as reader:
        for step, shard in enumerate((0, 1, 2, 0)):
            reader.reach(step)
            assert shard in maps.held
    assert maps.copies == [0, 1, 2, 0]


def test_a_disk_without_room_leaves_shards_out() -> None:
    maps = Maps(3, lambda shard: shard != 1)
    with ahead(maps, [[0], [1], [1, 2]], budget=3) as reader:
        for step in range(3):
            reader.reach(step)
        assert maps.held == {2}


def test_the_error_of_a_copy_ends_training() -> None:
    def fail(shard: int) -> bool:
        if shard == 1:
            raise OSError("storage")
        return True

    with ahead(Maps(3, fail), [[0], [1], [2]], budget=3) as reader, pytest.raises(OSError, match="storage"):
        for step in range(3):
            reader.reach(step)
