"""The two errors that end a command with one sentence in place of a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can correct: the message names the key or file, what was found and what to do. Exit code 2."""


class JobFailedError(RuntimeError):
    """A job that failed for a known reason, which the message names. Exit code 1."""
