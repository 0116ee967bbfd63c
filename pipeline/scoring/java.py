"""Java programs that answer: started with a heap that fits, talked to line by line, ended whatever happens.

Nothing here waits for ever: every call has a deadline, and a program that failed is started once more.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

SILENCE_S = 60.0  # METEOR answers within milliseconds once its tables are read (5 s on 2 cores)

T = TypeVar("T")


class JavaError(Exception):
    """Why a Java scorer gave no score, in words."""


def java_version() -> str:
    """The first line of `java -version`. Raises JavaError where java is not there or does not start."""
    java = shutil.which("java")
    if java is None:
        raise JavaError("java not found on the PATH; install a Java runtime (version 8 or later)")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{java} does not start: {error}") from error
    if done.returncode:
        raise JavaError(f"{java} -version ends with exit code {done.returncode}")
    return (done.stderr or done.stdout).strip().splitlines()[0] if (done.stderr or done.stdout).strip() else "java"


def java_command(heap_mb: tuple[int, int], *options: str) -> list[str]:
    """`java` from the PATH with a heap of half the free memory, between the two bounds (MB). Raises JavaError."""
    java = shutil.which("java")
    if java is None:
        raise JavaError("java not found on the PATH; install a Java runtime (version 8 or later)")
    fewest, most = heap_mb
    free = free_memory_mb()
    if free < fewest * 1.25:
        raise JavaError(f"it needs a Java heap of {fewest} MB, and only {free:.0f} MB of memory are free")
    heap = int(min(most, max(fewest, free / 2)))
    # The encoding is named because the default of Java before version 18 depends on the locale.
    return [java, f"-Xmx{heap}m", "-Dfile.encoding=UTF-8", *options]


def free_memory_mb() -> float:
    """What the machine or the container (cgroup version 2) has left, whichever is less."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    # No such file: not a Linux, or cgroup version 1; "max" is not a number: no limit.
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(free, 0) / 2**20


@contextlib.contextmanager
def java_process(command: list[str], folder: Path, *, talks: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A Java process in `folder`, ended when the block ends. What it prints goes to files there, its stdout only
    where it does not talk to us: an undrained pipe would stop it."""
    with (folder / "stdout.txt").open("wb") as stdout, (folder / "stderr.txt").open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else stdout,
                stderr=stderr,
                process_group=0,  # a group of its own, to end also what a wrapper script named java has started
            )
        except OSError as error:
            raise JavaError(f"java could not be started: {error}") from error
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Closing stdin flushes it, and the process that would read is gone.
                with contextlib.suppress(OSError):
                    pipe.close()


def talk(process: subprocess.Popen[bytes], request: str, on_line: Callable[[str], bool], until: float) -> None:
    """Writes the request and hands each line of the answer to `on_line` until that returns True.

    Neither a Java that does not read nor one that does not answer can hold us: both pipes are non-blocking. Raises
    JavaError when an answer does not come within the silence limit or by the time `until`, or never can.
    """
    assert process.stdin is not None and process.stdout is not None
    unsent, buffer = memoryview(request.encode()), b""
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        patience = min(until, time.monotonic() + SILENCE_S)
        while True:
            ready = selector.select(max(0.0, patience - time.monotonic()))
            if time.monotonic() > patience:
                raise JavaError("java gave no answer within the deadline")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:65536]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]  # it has ended; reading tells what there is to tell
                    if not unsent:
                        selector.unregister(process.stdin)
                    continue
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    raise JavaError(f"java ended early{_exit_code(process)}")
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > 65536:
                    raise JavaError(f"java answered what is not a score: {buffer[:60]!r}...")
                for line in lines:
                    if on_line(line.decode(errors="replace").strip()):
                        return
                    patience = min(until, time.monotonic() + SILENCE_S)


def finish(process: subprocess.Popen[bytes], until: float) -> None:
    """Waits for its end. Raises JavaError when that does not come by the time `until`, or with an exit code not 0."""
    try:
        code = process.wait(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise JavaError("java was not ready within the deadline") from None
    if code:
        raise JavaError(f"java ended with exit code {code}")


def with_one_restart(attempt: Callable[[Path, float], T], deadline_s: float) -> T:
    """`attempt(folder, until)` twice at most, both within the deadline: the first may take two thirds of it."""
    start = time.monotonic()
    reasons: list[str] = []
    for share in (2 / 3, 1):
        with tempfile.TemporaryDirectory(prefix="raycap-java-") as name:
            try:
                return attempt(Path(name), start + deadline_s * share)
            except JavaError as error:
                reasons.append(f"{error}{_said(Path(name))}")
    again = "the same again" if reasons[0] == reasons[1] else reasons[1]
    raise JavaError(f"{reasons[0]}; after one restart: {again}")


def _exit_code(process: subprocess.Popen[bytes]) -> str:
    try:
        return f" with exit code {process.wait(timeout=1)}"
    except subprocess.TimeoutExpired:  # it closed its output and goes on
        return ""


def _said(folder: Path) -> str:
    """What java wrote to stderr: the first line that names an error, else the first."""
    with (folder / "stderr.txt").open("rb") as file:
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Exception" in line or "Error:" in line or "OutOfMemory" in line]
    return f"; it said: {(errors or lines)[0].strip()[:300]}" if lines else ""
