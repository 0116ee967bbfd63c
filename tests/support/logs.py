"""What a test sees of raycap's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycap.pipeline.runtime.log import PACKAGE


@contextmanager
def on_message(act: Callable[[str], object]) -> Iterator[None]:
    """Calls `act` with every message from INFO on, in the thread that logs it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            act(record.getMessage())

    handler = Handler(logging.INFO)
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
