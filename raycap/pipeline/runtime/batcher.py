"""Collects the jobs that arrive while a batch is computed, and computes them as the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Batcher(Generic[Job, Answer]):
    """Computes one batch at a time. A batch has all waiting jobs, in order, but at most `max_size`.

    A job never waits for others to arrive, so that batches are small in an idle process and full in a busy one. In
    contrast, `ray.serve.batch` closes a batch a few milliseconds after its first job, and has a queue of small batches
    under load. compute: gives the answers to the jobs of a batch. It runs in `executor`.
    """

    def __init__(self, compute: Callable[[Sequence[Job]], Sequence[Answer]], max_size: int, executor: Executor) -> None:
        self.compute, self.max_size, self.executor = compute, max_size, executor
        self._waiting: deque[tuple[Job, asyncio.Future[Answer]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers to the jobs of a request, which may be in several batches. Raises what `compute` raises.

        The jobs of a cancelled call that still wait are left out.
        """
        loop = asyncio.get_running_loop()
        added = [(job, loop.create_future()) for job in jobs]
        self._waiting.extend(added)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return list(await asyncio.gather(*(future for _, future in added)))

    async def _work(self) -> None:
        """Computes batches until no job waits."""
        while batch := self._next_batch():
            jobs, futures = [job for job, _ in batch], [future for _, future in batch]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self.executor, self.compute, jobs)
            except Exception as error:  # each caller gets it
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, answer in zip(futures, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _next_batch(self) -> list[tuple[Job, asyncio.Future[Answer]]]:
        """The next waiting jobs whose callers still wait."""
        batch: list[tuple[Job, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.max_size:
            job, future = self._waiting.popleft()
            if not future.done():
                batch.append((job, future))
        return batch
