"""Copies whole shards of a remote store to the cache before training reads them, and lets them go after use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np

from raycap.pipeline.features.store.shards import NUM_COPIES, ShardMaps


class ReadAhead:
    """Holds the shards of the current step of training in the cache, and those of later steps as far as it has room.

    A thread goes through the steps and copies the shards of each. It waits while shards that training may still read
    fill the budget. When training has reached a step whose shards exceed the budget alone, the thread leaves some out,
    and their rows are read in ranges.
    """

    def __init__(
        self, maps: ShardMaps, shards_at: Callable[[int], np.ndarray], start: int, stop: int, budget: int
    ) -> None:
        """shards_at: the shards around each step from start to stop - 1. budget: in bytes."""
        self.maps, self.shards_at, self.start, self.stop, self.budget = maps, shards_at, start, stop, budget
        self._changed = threading.Condition()
        self._last_use: dict[int, int] = {}  # by shard in the cache: the last step known to read it
        self._held_bytes = 0
        self._reached = start - 1  # the step that training reads
        self._begun = self._done = start - 1  # the last step whose shards are known, and that whose copies have ended
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the thread after the copies that it is making, and lets all shards go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._let_go(list(self._last_use))

    def reach(self, step: int) -> None:
        """Waits until the shards of a step are in the cache, and lets those go that only earlier steps have read.

        Steps must be reached in ascending order. Raises the error that stopped the copies.
        """
        with self._changed:
            self._reached = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._begun >= step or self._error)
            self._let_go([shard for shard, last in self._last_use.items() if last < step])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= step or self._error)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(NUM_COPIES) as pool:
                for step in range(self.start, self.stop):
                    copies = [pool.submit(self._copy, shard) for shard in self._admitted(step)]
                    for copy in copies:
                        copy.result()
                    with self._changed:
                        self._done = step
                        self._changed.notify_all()
                        if self._is_closed:
                            return
        except BaseException as error:  # raised by `reach`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admitted(self, step: int) -> Sequence[int]:
        """Waits until the budget has room for the shards of a step, and returns those of them that must be copied."""
        shards, admitted = self.shards_at(step).tolist(), []
        with self._changed:
            self._last_use.update((shard, step) for shard in shards if shard in self._last_use)
            self._begun = step
            self._changed.notify_all()
            for shard in shards:
                if shard not in self._last_use and self._admit(shard, step):
                    admitted.append(shard)
        return admitted

    def _admit(self, shard: int, step: int) -> bool:
        """Waits for room for a shard; False if there is none in the step that training reads, or after `__exit__`."""
        size = self.maps.infos[shard].bytes

        def has_room() -> bool:
            return self._held_bytes + size <= self.budget

        self._changed.wait_for(lambda: has_room() or self._reached >= step or self._is_closed)
        if not has_room() or self._is_closed:
            return False
        self._last_use[shard], self._held_bytes = step, self._held_bytes + size
        return True

    def _copy(self, shard: int) -> None:
        """Copies an admitted shard. It is let go at once if the disk has no room for it."""
        if not self.maps.hold(shard):
            with self._changed:
                self._let_go([shard])

    def _let_go(self, shards: Sequence[int]) -> None:
        """The caller has the lock."""
        for shard in shards:
            del self._last_use[shard]
            self._held_bytes -= self.maps.infos[shard].bytes
            self.maps.let_go(shard)
