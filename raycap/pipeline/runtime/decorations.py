"""Decorations: the parts of a result that people look at, such as pages and pictures, and what a tracker gets.

A decoration that fails harms no result, so it must not end the command that computed the result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raycap.pipeline.errors import UserError, cause_of
from raycap.pipeline.runtime.secrets import without_secrets

logger = logging.getLogger(__name__)

MAX_REASON = 300  # characters


class Decorations:
    """The decorations of one result, made after its scores are written.

    failed: {decoration: reason} of those that could not be made.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Records an error of the context in `failed` and does not raise it, unless it is a mistake of the user.

        What a task refuses is no such mistake: the driver has checked the same configuration, so that only the node of
        the task can differ.
        """
        try:
            yield
        except Exception as error:
            cause = cause_of(error)
            if isinstance(error, UserError) and cause is error:
                raise
            reason = without_secrets(f"{type(cause).__name__}: {cause}")  # it is stored
            self.failed[name] = " ".join(reason.split())[:MAX_REASON]
            logger.debug(f"{name} failed", exc_info=True)

    def log_failed(self, remedy: str = "the same command makes it again") -> None:
        """Logs one line for each decoration that could not be made."""
        for name, reason in self.failed.items():
            logger.warning(f"{name} could not be made ({reason}); {remedy}")
