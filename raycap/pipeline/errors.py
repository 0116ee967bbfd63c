"""The errors that end a command, or explain a missing score, with one sentence in place of a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct. The message names the key or file, its value and a remedy. Exit code 2."""


class JobFailedError(RuntimeError):
    """The failure of a job, for a reason that the message names. Exit code 1."""


class DamagedError(JobFailedError):
    """A file of raycap is not what was written: it is missing, cut or changed. The message begins with its name."""


class UnavailableError(Exception):
    """A metric has no value for these captions. The message is the reason."""


def cause_of(error: BaseException) -> BaseException:
    """The error that a task's function has raised, without the errors in which Ray wraps it. Others as they are.

    The text of Ray's error is a traceback. If a task waits for another task, the error is wrapped twice.
    """
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error
