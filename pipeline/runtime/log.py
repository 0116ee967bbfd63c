"""Logging: one formatter for the terminal and one for a run's log file.

Modules log with `logging.getLogger(__name__)`. `configure_logging` makes these records visible; without it (in a test,
in a program that imports raycap) the standard rules of `logging` apply.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

PACKAGES = ("jobs", "pipeline", "models")
_indent: ContextVar[str] = ContextVar("indent", default="")
_rank = 0


def configure_logging(level: int = logging.INFO) -> None:
    """Shows records from `level` on at the terminal (standard output). Calling it again changes the level.

    A log file holds records from INFO on even if the terminal shows warnings only.
    """
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(min(level, logging.INFO))
        handler = next((handler for handler in logger.handlers if isinstance(handler, _TerminalHandler)), None)
        if handler is None:
            handler = _TerminalHandler()
            handler.setFormatter(_Formatter())
            logger.addHandler(handler)
        handler.setLevel(level)


def set_rank(rank: int) -> None:
    """Marks the records of this process with its rank in data-parallel training; rank 0 stays unmarked."""
    global _rank
    _rank = rank


@contextmanager
def indented() -> Iterator[None]:
    """Indents the records of a job that runs inside another one, such as the run inside a retraining."""
    token = _indent.set(_indent.get() + "  ")
    try:
        yield
    finally:
        _indent.reset(token)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Appends records to a file too, each with its date and time. A file that cannot be written is reported once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logging.getLogger(__name__).warning(f"{path} cannot be written: {error.strerror or error}")
        yield
        return
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    loggers = [logging.getLogger(name) for name in PACKAGES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


class _Formatter(logging.Formatter):
    """Every line of a message with its level (from WARNING on, at the terminal), its rank and its indentation."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        plain_warning = record.levelno >= logging.WARNING and self._fmt == "%(message)s"
        prefix = _indent.get() + (f"[rank {_rank}] " if _rank else "")
        prefix += f"{record.levelname.lower():<9} " if plain_warning else ""
        lines = record.message.split("\n")
        record.message = "\n".join(f"{prefix}{line}" if line else "" for line in lines)
        return super().formatMessage(record)


class _TerminalHandler(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stdout` is at the time, so that redirections take effect."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        pass
