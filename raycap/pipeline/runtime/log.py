"""The log of a command: its lines at the terminal and in a file, the progress of long work, and failed pages.

A command calls `configure_logging`, which shows the records of raycap's modules at the terminal. `log_file` also
appends records to a file. A program that imports raycap calls neither, so the standard rules of `logging` apply there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from raycap.pipeline.errors import JobFailedError, UserError, cause_of
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.runtime.secrets import without_secrets

PACKAGE = "raycap"
_rank = 0
LINE_EVERY_S = 5.0  # seconds between two lines about the progress of one task
logger = logging.getLogger(__name__)
MAX_REASON = 300  # characters of the reason why a page or picture failed


def configure_logging(level: int = logging.INFO) -> None:
    """Shows records of `level` or above at the terminal (standard output). A second call changes the level.

    A log file gets records of INFO or above even if the terminal shows warnings only. Handlers of the root logger get
    no records, because they do not remove secrets. A handler that fails prints nothing, because Python's report of the
    failure would contain secrets.
    """
    logging.raiseExceptions = False
    handler = _terminal_handler() or _TerminalHandler()
    handler.uses_stderr = False
    handler.setLevel(level)
    package = logging.getLogger(PACKAGE)
    package.setLevel(min(level, logging.INFO))
    package.propagate = False
    package.addHandler(handler)


def log_to_stderr() -> None:
    """Shows all later records on standard error, because another program may read the standard output."""
    handler = _terminal_handler()
    if handler:
        handler.uses_stderr = True


@contextmanager
def unchanged_level() -> Iterator[None]:
    """Restores the terminal's level at the end of the context, within which it may be changed."""
    handler = _terminal_handler()
    level = handler.level if handler else logging.NOTSET
    try:
        yield
    finally:
        if handler:
            handler.setLevel(level)


def set_rank(rank: int) -> None:
    """Begins the records of this process with `[rank N]`, unless its rank in data-parallel training is 0."""
    global _rank
    _rank = rank


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Within the context, records are also appended to a file, with date and time.

    If an exception ends the context, it is appended, too. If the file cannot be opened, one warning is logged and no
    records are appended.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise OSError("a link or a pipe has its name")
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning(f"{path} cannot be written: {error.strerror or error}")
        yield
        return
    handler.setFormatter(_Formatter(in_file=True))
    package = logging.getLogger(PACKAGE)
    package.addHandler(handler)
    try:
        yield
    except BaseException as error:
        is_expected = isinstance(error, UserError | JobFailedError | KeyboardInterrupt)
        trace = None if is_expected else sys.exc_info()
        text = f"stopped by {type(error).__name__}: {error}"
        handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, trace))
        raise
    finally:
        package.removeHandler(handler)
        handler.close()


class _Formatter(logging.Formatter):
    """Begins every line of a record with its rank, and removes secrets.

    In a file, a line also has date, time and level. On the terminal, a line has its level unless the level is INFO.
    Control characters are escaped, because a record may contain names and texts that strangers wrote.
    """

    def __init__(self, *, in_file: bool) -> None:
        super().__init__("%(message)s")
        self.in_file = in_file

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"[rank {_rank}] " if _rank else ""
        if self.in_file:
            prefix = f"{self.formatTime(record)} {record.levelname:<7} {prefix}"
        elif record.levelno != logging.INFO:
            prefix += f"{record.levelname.lower():<9} "
        lines = map(printable, without_secrets(super().format(record)).split("\n"))
        return "\n".join(f"{prefix}{line}" if line else "" for line in lines)


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """Looks up `sys.stdout` or `sys.stderr` for each record, because a program may replace these streams."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_stderr = False
        self.setFormatter(_Formatter(in_file=False))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr if self.uses_stderr else sys.stdout
        super().emit(record)


def _terminal_handler() -> _TerminalHandler | None:
    """The handler that `configure_logging` added. None if it was not called yet."""
    handlers = logging.getLogger(PACKAGE).handlers
    return next((handler for handler in handlers if isinstance(handler, _TerminalHandler)), None)


@contextmanager
def progress(label: str, total: int | None, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Yields a function that takes a number of newly done images, and logs the progress every LINE_EVERY_S seconds.

    total: None if it is unknown. The rate is that after the first images, because processes start before these.
    """
    last = time.monotonic()
    done, first = 0, (0.0, 0)

    def advance(count: int) -> None:
        nonlocal done, last, first
        now, is_first = time.monotonic(), done == 0
        done += count
        if is_first:
            first = now, done
        if now - last > LINE_EVERY_S:
            last = now
            line = f"{label}  {done} {unit}" if total is None else f"{label}  {done}/{total} {unit}"
            if total is not None and done > first[1]:
                rate = (done - first[1]) / (now - first[0])
                line += f", {rate:.1f} {unit}/s, {(total - done) / rate:.0f} s left"
            logger.info(line)

    yield advance


class Decorations:
    """Records which decorations of a result fail. Decorations are pages, plots and pictures, made after the scores.

    failed: {name of a decoration that could not be made: reason}.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Within the context, records an error in `failed` instead of raising it. A UserError is raised.

        A UserError from a Ray task is recorded like other errors: as the driver has checked the same configuration
        before, the task's error is no mistake of the user.
        """
        try:
            yield
        except Exception as error:
            cause = cause_of(error)
            if isinstance(error, UserError) and cause is error:
                raise
            reason = without_secrets(f"{type(cause).__name__}: {cause}")  # because the reason is stored
            self.failed[name] = " ".join(reason.split())[:MAX_REASON]
            logger.debug(f"{name} failed", exc_info=True)

    def log_failed(self, remedy: str = "the same command makes it again") -> None:
        """Logs a warning for each decoration that could not be made. remedy: the last words of the warning."""
        for name, reason in self.failed.items():
            logger.warning(f"{name} could not be made ({reason}); {remedy}")
