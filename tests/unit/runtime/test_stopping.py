"""Ctrl-C and SIGTERM: the first one interrupts or waits for a save, a second one ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from raycap.pipeline.runtime import stopping
from raycap.pipeline.runtime.stopping import (
    SAVING,
    STOPPED,
    call_in_thread,
    exit_code,
    handle_signals,
    restoring_handlers,
    saving_first,
)


class Ended(Exception):
    """Raised by a test in place of the end of the process."""


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The handlers of a command. Those of pytest are restored."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(stopping.os, "_exit", end)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    handle_signals()
    yield
    handle_signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_interrupts_and_a_second_one_ends_the_process(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert exit_code() == code
    signal.raise_signal(number)  # the same signal, which a wrapper has passed on
    monkeypatch.setattr(stopping, "REPEAT_S", 0.0)
    with pytest.raises(Ended, match=str(code)):
        signal.raise_signal(number)
    assert capfd.readouterr().err == f"{STOPPED}\n"


@pytest.mark.parametrize("fails", [False, True])
def test_the_work_is_saved_first(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the outcome of saving is, the process ends by the signal."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), saving_first(lambda: done.append("asked")):
        signal.raise_signal(signal.SIGTERM)
        done.append("saved")
        if fails:
            raise RuntimeError("the workers are gone")
    assert done == ["asked", "saved"] and exit_code() == 143
    assert signal.alarm(0) == 0, "no alarm is left"
    assert capfd.readouterr().err == f"{SAVING}\n", "who waits knows what a second signal does"


def test_saving_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAVE_LIMIT_S", 1)
    with pytest.raises(KeyboardInterrupt), saving_first(lambda: None):
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(60)
        pytest.fail("the alarm did not come")


def test_handlers_are_restored_after_a_library_replaced_them() -> None:
    """This includes handlers of native code, which Python does not see, such as Ray's, which dumps the stack."""
    ours, libc = signal.getsignal(signal.SIGTERM), ctypes.CDLL(None)
    with restoring_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is ours
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_rays_handler_stops_a_command_as_ours() -> None:
    def exit_as_ray(number: int, _: object) -> None:
        sys.exit(number)

    with pytest.raises(KeyboardInterrupt), restoring_handlers():
        signal.signal(signal.SIGTERM, exit_as_ray)
        signal.raise_signal(signal.SIGTERM)
    assert exit_code() == 143


def test_a_signal_meets_our_handler_while_a_library_trains() -> None:
    """Ray Train would install its own handler in the main thread, and end the workers before they save."""
    asked = threading.Event()

    def train() -> str:
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        return "saved" if asked.wait(10) else "not asked"

    with pytest.raises(KeyboardInterrupt), saving_first(asked.set):
        assert call_in_thread(train) == "saved"
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda: 1 // 0)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell starts background jobs with Ctrl-C ignored, because it is meant for the job in the foreground."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle_signals()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
