"""Logging: one formatter for the terminal and one for a run's log file.

`configure_logging` shows the records of raycap's modules. Without it (in a test, in a program that imports raycap) the
standard rules of `logging` apply.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.runtime.secrets import without_secrets

PACKAGE = "raycap"
_indent: ContextVar[str] = ContextVar("indent", default="")
_rank = 0


def configure_logging(level: int = logging.INFO) -> None:
    """Shows records of `level` or above at the terminal (standard output). A second call changes the level.

    A log file gets records of INFO or above even if the terminal shows warnings only. Handlers of other programs get
    no records, because these handlers do not remove secrets. For the same reason, a handler that fails prints nothing.
    """
    logging.raiseExceptions = False
    handler = _terminal_handler() or _TerminalHandler()
    handler.uses_stderr = False
    handler.setLevel(level)
    logger = logging.getLogger(PACKAGE)
    logger.setLevel(min(level, logging.INFO))
    logger.propagate = False
    logger.addHandler(handler)


def log_to_stderr() -> None:
    """Shows records on standard error from now on, in a command whose standard output another program may read."""
    if handler := _terminal_handler():
        handler.uses_stderr = True


def is_shown(level: int) -> bool:
    """Whether the terminal shows records of this level."""
    handler = _terminal_handler()
    return handler is not None and handler.level <= level


@contextmanager
def unchanged_level() -> Iterator[None]:
    """Restores the terminal's level at the end of the context."""
    handler = _terminal_handler()
    level = handler.level if handler else logging.NOTSET
    try:
        yield
    finally:
        if handler:
            handler.setLevel(level)


def set_rank(rank: int) -> None:
    """Marks the records of this process with its rank in data-parallel training; rank 0 stays unmarked."""
    global _rank
    _rank = rank


@contextmanager
def indented() -> Iterator[None]:
    """Indents the records of a job that runs inside another job, such as the run inside a retraining."""
    token = _indent.set(_indent.get() + "  ")
    try:
        yield
    finally:
        _indent.reset(token)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """In the context, records are also appended to a file, with date and time. So is an error that ends the context.

    If the file cannot be written, one warning is logged instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logging.getLogger(__name__).warning(f"{path} cannot be written: {error.strerror or error}")
        yield
        return
    handler.setFormatter(_Formatter(in_file=True))
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        trace = None if isinstance(error, UserError | JobFailedError | KeyboardInterrupt) else sys.exc_info()
        text = f"stopped by {type(error).__name__}: {error}"
        record = logging.LogRecord(
            __name__, logging.ERROR, pathname=__file__, lineno=0, msg=text, args=None, exc_info=trace
        )
        handler.handle(record)
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


class _Formatter(logging.Formatter):
    """Begins every line of a record with its indentation and rank, and removes secrets.

    In a file a line also has its date, time and level. On the terminal it has its level unless that is INFO. Control
    characters are escaped, because a record may contain names and texts from elsewhere.
    """

    def __init__(self, *, in_file: bool) -> None:
        super().__init__("%(message)s")
        self.in_file = in_file

    def format(self, record: logging.LogRecord) -> str:
        prefix = _indent.get() + (f"[rank {_rank}] " if _rank else "")
        if self.in_file:
            prefix = f"{self.formatTime(record)} {record.levelname:<7} {prefix}"
        elif record.levelno != logging.INFO:
            prefix += f"{record.levelname.lower():<9} "
        lines = map(printable, without_secrets(super().format(record)).split("\n"))
        return "\n".join(f"{prefix}{line}" if line else "" for line in lines)


class _TerminalHandler(logging.StreamHandler[Any]):
    """Writes to the present `sys.stdout` or `sys.stderr`, so that redirections take effect."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_stderr = False
        self.setFormatter(_Formatter(in_file=False))

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "has_bar", False):  # then a progress bar shows the same as the record
            self.stream = sys.stderr if self.uses_stderr else sys.stdout
            super().emit(record)


def _terminal_handler() -> _TerminalHandler | None:
    """The handler that `configure_logging` added; None before its first call."""
    handlers = logging.getLogger(PACKAGE).handlers
    return next((handler for handler in handlers if isinstance(handler, _TerminalHandler)), None)
