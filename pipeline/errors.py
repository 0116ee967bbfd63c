"""The error class for mistakes of the user: one sentence and exit code 2, never a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct: the message names the key or file, what was found and what to do."""
