"""Errors that the user sees as one sentence instead of a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct. The message names key or file, value and remedy. The exit code is 2."""


class JobFailedError(RuntimeError):
    """A job failed. The message gives the reason. The exit code of the command is 1."""


class DamagedError(JobFailedError):
    """A file that raycap wrote is missing, truncated or changed. The message begins with the name of the file."""


class UnavailableError(Exception):
    """A metric cannot be computed for the given captions, or on this machine. The message gives the reason."""


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that the function of a Ray task raised. Errors of other origin are returned unchanged.

    Ray's wrappers are removed, because their text is a traceback. If a task waits for another task, there are two.
    """
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
