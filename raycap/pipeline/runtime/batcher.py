"""Batches of jobs: the jobs that arrive while one batch is computed become the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Batcher(Generic[Job, Answer]):
    """Computes one batch at a time. A batch contains the waiting jobs in order of arrival, but at most `max_size`.

    compute: returns the answers to the jobs of a batch, in order, and runs in `executor`.

    No job waits for other jobs to arrive, so batches are small while the process is idle and full while it is busy. In
    contrast, `ray.serve.batch` closes a batch a few milliseconds after its first job, so under load it computes many
    small batches.
    """

    def __init__(self, compute: Callable[[Sequence[Job]], Sequence[Answer]], max_size: int, executor: Executor) -> None:
        self.compute, self.max_size, self.executor = compute, max_size, executor
        self._waiting: deque[tuple[Job, asyncio.Future[Answer]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, jobs: Sequence[Job]) -> list[Answer]:
        """Returns the answers to the jobs of a request, in order. Raises what `compute` raises.

        The jobs may be divided between batches. If the call is cancelled, its waiting jobs are not computed.
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
            jobs = [job for job, _ in batch]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self.executor, self.compute, jobs)
            except Exception as error:  # each caller with a job in the batch gets the error
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _next_batch(self) -> list[tuple[Job, asyncio.Future[Answer]]]:
        """Removes and returns the next jobs from the queue, without those whose calls were cancelled."""
        batch: list[tuple[Job, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.max_size:
            job, future = self._waiting.popleft()
            if not future.done():
                batch.append((job, future))
        return batch
