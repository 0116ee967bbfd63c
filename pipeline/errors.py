"""The one error class for mistakes of the caller: said in one sentence, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: the message names the key or file, what was found and what to do."""
