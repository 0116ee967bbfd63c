"""What interrupts the tasks of Ray Data: a lost process, or an outage of the storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raycap.pipeline.errors import JobFailedError
from raycap.pipeline.storage.s3 import OutageError, StorageError

MAX_INIT_DEATHS = 3  # actors in a row that may die while they start, for example because memory is short
MAX_STORAGE_RETRIES = 5  # of a task; each attempt repeats its requests for minutes, and pauses follow it


def repeat_interrupted_tasks() -> None:
    """Repeats what an outage of the storage has interrupted. Ray Data itself repeats the tasks of lost nodes.

    A repeated task must be harmless.
    """
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.max_consecutive_actor_init_deaths = MAX_INIT_DEATHS
    context.retried_map_errors = [StorageError.__name__, OutageError.__name__]
    context.max_map_retries = MAX_STORAGE_RETRIES
    context.raise_original_map_exception = True  # otherwise the type of the error is lost


@contextmanager
def one_sentence(stage: str) -> Iterator[None]:
    """Raises a StorageError of a task as such, and JobFailedError for processes that Ray has lost too often."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, StorageError):
            raise type(error.cause)(str(error.cause).splitlines()[0]) from error  # Ray Data adds lines
        raise
    except RayError as error:
        reason = " ".join(str(error).split())
        raise JobFailedError(f"{stage} lost a process several times, last with: {reason}") from error
