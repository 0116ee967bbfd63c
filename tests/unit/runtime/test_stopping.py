"""Ctrl-C and SIGTERM: the first one interrupts or waits for a save, a second one ends the process."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from raycap.pipeline.runtime import stopping
from raycap.pipeline.runtime.stopping import (
    REPEAT_S,
    SAVING,
    STOPPED,
    exit_code,
    handle_signals,
    keeping_handlers,
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


def test_an_interrupt_without_a_signal_counts_as_ctrl_c() -> None:
    assert exit_code() == 130


@pytest.mark.parametrize("fails", [False, True])
def test_the_work_is_saved_first(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Its outcome does not matter: the signal has the last word."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), saving_first(lambda: done.append("asked")):
        signal.raise_signal(signal.SIGTERM)
        done.append("saved")
        if fails:
            raise RuntimeError("the workers are gone")
    assert done == ["asked", "saved"] and exit_code() == 143
    assert signal.alarm(0) == 0, "no alarm is left"
    assert capfd.readouterr().err == f"{SAVING}\n", "who waits knows what a second signal does"


def test_two_quick_presses_of_a_person_are_two_signals() -> None:
    assert REPEAT_S < 0.2
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    time.sleep(REPEAT_S + 0.01)
    with pytest.raises(Ended, match="130"):
        signal.raise_signal(signal.SIGINT)


def test_saving_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAVE_LIMIT_S", 1)
    with pytest.raises(KeyboardInterrupt), saving_first(lambda: None):
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(60)
        pytest.fail("the alarm did not come")


def test_without_a_signal_nothing_changes() -> None:
    with saving_first(lambda: None):
        pass
    with pytest.raises(ValueError, match="x"), saving_first(lambda: None):
        raise ValueError("x")


def test_a_second_signal_does_not_wait_for_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "REPEAT_S", 0.0)
    with pytest.raises(KeyboardInterrupt), saving_first(lambda: None):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.001)
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGTERM)


def test_a_library_cannot_replace_the_handlers() -> None:
    def other(*_: object) -> None:
        pytest.fail("the handler of a library was called")

    ours, earlier = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with keeping_handlers():
        assert signal.signal(signal.SIGTERM, other) is ours
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGTERM) is ours
    assert signal.signal(signal.SIGUSR1, earlier) is other, "other signals are the library's"


def test_native_code_cannot_replace_the_handlers() -> None:
    """A handler that Python does not see, as Ray's, which dumps the stack."""
    libc = ctypes.CDLL(None)
    with keeping_handlers():
        libc.signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_ray_does_not_replace_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` sets a handler that ends the process with a dump of the native stack."""
    import ray

    from raycap.pipeline.cluster.start import connect

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    ours = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("raycap.pipeline.cluster.start._require_answer", lambda address: None)
    assert connect("127.0.0.1:6379") and signal.getsignal(signal.SIGTERM) is ours


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell starts background jobs with Ctrl-C ignored, because it is meant for the job in the foreground."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle_signals()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
