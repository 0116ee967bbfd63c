"""What Ctrl-C (SIGINT) and SIGTERM do to a command.

The first signal raises KeyboardInterrupt in the main thread, so that a command can clean up. Within `saving_first`, the
work is first asked to save its state, and KeyboardInterrupt is raised at the end of the context or after SAVE_LIMIT_S
seconds. A second signal ends the process at once.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

STOPPED = "raycap: stopped; run the same command again to continue"
SAVE_LIMIT_S = 30
SAVING = "raycap: saving before it stops; a second Ctrl-C ends it at once"
# Signals within this many seconds count as one, because a process may get the same signal from the terminal or system
# and once more from a wrapper. A person who presses Ctrl-C twice takes longer.
REPEAT_S = 0.15

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Result = TypeVar("Result")


class _Received:
    """The first signal that the process received, its time, and the function that asks the work to save (or None)."""

    number: int | None = None
    time_s = 0.0
    save: Callable[[], None] | None = None


def handle_signals(*, even_ignored: bool = False) -> None:
    """Forgets an earlier signal and installs the handlers. Outside the main thread, no handlers are installed.

    even_ignored: also for signals that are ignored, as Ctrl-C is in background jobs of a shell.
    """
    _Received.number = _Received.save = None
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if even_ignored or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        signal.signal(signal.SIGALRM, _interrupt)


def exit_code() -> int:
    """The exit code of a stopped command: 143 after SIGTERM, 130 after Ctrl-C."""
    return 128 + (_Received.number or signal.SIGINT)


@contextmanager
def saving_first(ask: Callable[[], None]) -> Iterator[None]:
    """Within the context, the first signal calls `ask` instead of interrupting the work.

    ask: asks the work to save its state and end. The function must return at once.

    After a signal, KeyboardInterrupt is raised at the end of the context, also if the work has failed, or after
    SAVE_LIMIT_S seconds. Outside the main thread, the context changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Received.save = ask
    try:
        yield
    finally:
        _Received.save = None
        if _Received.number is not None:
            signal.alarm(0)
            raise KeyboardInterrupt


@contextmanager
def restoring_handlers() -> Iterator[None]:
    """Installs the signal handlers again at the end of the context, because Ray replaces them, also in native code.

    On SIGTERM, Ray's handler raises SystemExit. The context raises KeyboardInterrupt in its place.
    """
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        _Received.number, _Received.time_s = signal.SIGTERM, time.monotonic()
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def call_in_thread(function: Callable[[], Result]) -> Result:
    """Runs a function in another thread and returns its result, so that Ray Train cannot replace signal handlers.

    The main thread waits and handles signals. If a signal raises an exception there, the function continues in the
    background until the process ends.
    """
    future, context = Future[Result](), contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def _stop(number: int, _: object) -> None:
    """The handler of Ctrl-C and SIGTERM."""
    if _Received.number is None:
        _Received.number, _Received.time_s = number, time.monotonic()
        if _Received.save is None:
            raise KeyboardInterrupt
        os.write(2, f"{SAVING}\n".encode())  # `print` would fail if the signal interrupted another `print`
        signal.alarm(SAVE_LIMIT_S)
        _Received.save()
    elif time.monotonic() - _Received.time_s > REPEAT_S:
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(exit_code())


def _interrupt(*_: object) -> None:
    """The handler of the alarm. Raises KeyboardInterrupt, because a main thread inside Ray ignores other exceptions."""
    raise KeyboardInterrupt
