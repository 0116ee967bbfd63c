"""What a test sees of raycap's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycap.pipeline.runtime.log import PACKAGES


@contextmanager
def on_message(act: Callable[[str], object]) -> Iterator[None]:
    """Calls `act` with every message from INFO on, in the thread that logs it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            act(record.getMessage())

    handler = Handler(logging.INFO)
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
