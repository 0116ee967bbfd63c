"""Batches of the jobs that wait while the batch before is computed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycap.pipeline.serving.host import Batcher


class Computed:
    """Answers each job, a number, with its double, and records the batches. Job 13 fails. may_end: an event for which
    computing waits."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_end, self.has_begun = threading.Event(), threading.Event()

    def __call__(self, jobs: Sequence[int]) -> list[int]:
        self.batches.append(list(jobs))
        self.has_begun.set()
        assert self.may_end.wait(30)
        if 13 in jobs:
            raise ValueError("13")
        return [2 * job for job in jobs]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def first_begun(computed: Computed) -> None:
    assert await asyncio.to_thread(computed.has_begun.wait, 30)


def test_a_job_does_not_wait_and_later_ones_share_a_batch(executor: ThreadPoolExecutor) -> None:
    async def run() -> list[list[int]]:
        computed = Computed()
        batcher: Any = Batcher(computed, 4, executor)
        calls = [asyncio.create_task(batcher([0]))]
        await first_begun(computed)
        calls += [asyncio.create_task(batcher(jobs)) for jobs in ([1, 2], [3], [4, 5, 6])]
        await asyncio.sleep(0)
        computed.may_end.set()
        assert await asyncio.gather(*calls) == [[0], [2, 4], [6], [8, 10, 12]]
        return computed.batches

    assert asyncio.run(run()) == [[0], [1, 2, 3, 4], [5, 6]]


def test_a_cancelled_call_is_left_out_and_a_failure_is_that_of_its_batch(executor: ThreadPoolExecutor) -> None:
    async def run() -> list[list[int]]:
        computed = Computed()
        batcher: Any = Batcher(computed, 2, executor)
        calls = [asyncio.create_task(batcher([0]))]
        await first_begun(computed)
        calls += [asyncio.create_task(batcher([job])) for job in (1, 2, 13, 3, 4)]
        await asyncio.sleep(0)
        calls[1].cancel()
        computed.may_end.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert found[0] == [0] and isinstance(found[1], asyncio.CancelledError)
        assert [isinstance(each, ValueError) for each in found[2:4]] == [True, True] and found[4:] == [[6], [8]]
        assert await batcher([7, 8, 9]) == [14, 16, 18], "it works after a failure"
        assert await batcher([]) == []
        return computed.batches

    assert asyncio.run(run()) == [[0], [2, 13], [3, 4], [7, 8], [9]]


@pytest.mark.parametrize("seed", range(2))
def test_every_call_gets_its_answers_in_order(executor: ThreadPoolExecutor, seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 9) for _ in range(60)]

    async def run() -> None:
        computed = Computed()
        computed.may_end.set()
        batcher: Any = Batcher(computed, 5, executor)

        async def call(first: int, size: int) -> None:
            await asyncio.sleep(generator.random() / 50)
            jobs = [100 * first + number + 14 for number in range(size)]
            assert await batcher(jobs) == [2 * job for job in jobs]

        await asyncio.gather(*(call(*each) for each in enumerate(sizes)))
        counts = [len(batch) for batch in computed.batches]
        assert sum(counts) == sum(sizes) and max(counts) <= 5

    asyncio.run(run())
