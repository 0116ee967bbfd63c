"""Java subprocesses. Their heap fits the free memory, and they never outlive the call that started them."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

SILENCE_S = 300.0  # longest wait for a line; METEOR loads tables for 5 s, or much longer on an overloaded machine
_CHUNK = 65536  # bytes that are written or read at once; a longer answer is not a score

T = TypeVar("T")


class JavaError(Exception):
    """A Java program gave no result. The message is the reason."""


def java_version() -> str:
    """The first line of `java -version`. Raises JavaError when java is missing or does not start."""
    java = _find_java()
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaError(f"{java} does not start: {error}") from error
    if done.returncode:
        raise JavaError(f"{java} -version ends with exit code {done.returncode}")
    return next(iter((done.stderr or done.stdout).strip().splitlines()), "java")


def java_command(heap_mb: tuple[int, int], *options: str) -> list[str]:
    """The first words of a command: java with a heap of half the free memory, within heap_mb = (smallest, largest).

    Raises JavaError when java is missing or the free memory is too small.
    """
    java = _find_java()
    (smallest, largest), free = heap_mb, free_memory_mb()
    if free < smallest * 1.25:  # Java also needs memory outside of its heap
        raise JavaError(f"it needs a Java heap of {smallest} MB, and only {free:.0f} MB of memory are free")
    heap = int(min(largest, max(smallest, free / 2)))
    # The encoding is set because before Java 18 its default depends on the locale.
    return [java, f"-Xmx{heap}m", "-Dfile.encoding=UTF-8", *options]


def _find_java() -> str:
    """The path of the program java. Raises JavaError when it is missing."""
    java = shutil.which("java")
    if java is None:
        raise JavaError("java not found on the PATH; install a Java runtime (version 8 or later)")
    return java


def free_memory_mb() -> float:
    """Free memory of the machine or of the container (cgroup version 2), whichever is less."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    # The file is missing on other systems and with cgroup version 1; "max" is not a number and means no limit.
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(free, 0) / 2**20


@contextlib.contextmanager
def java_process(command: list[str], folder: Path, *, talks: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A Java process in `folder`, killed when the block ends. talks: whether stdin and stdout are pipes."""
    target = subprocess.PIPE if talks else subprocess.DEVNULL
    with (folder / "stderr.txt").open("wb") as stderr:
        try:
            # The process group lets killpg end child processes as well: java may be a wrapper script.
            process = subprocess.Popen(command, cwd=folder, stdin=target, stdout=target, stderr=stderr, process_group=0)
        except OSError as error:
            raise JavaError(f"java could not be started: {error}") from error
    with process:  # closes the pipes at its end
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def talk(process: subprocess.Popen[bytes], requests: Sequence[str], answers: int, until: float) -> Iterator[str]:
    """Writes the requests as lines, and yields the first `answers` lines that the process prints.

    Both pipes are non-blocking, so a process that does not read or does not answer cannot block the caller. Raises
    JavaError when no line comes within SILENCE_S or before `until` (a time.monotonic()), and when the process ends
    early.
    """
    assert process.stdin is not None and process.stdout is not None
    unsent, buffer = memoryview("".join(f"{request}\n" for request in requests).encode()), b""
    with selectors.DefaultSelector() as selector:
        for pipe, event in ((process.stdout, selectors.EVENT_READ), (process.stdin, selectors.EVENT_WRITE)):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, event)
        deadline = min(until, time.monotonic() + SILENCE_S)
        while answers > 0:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise JavaError("java gave no answer within the deadline")
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:_CHUNK]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]  # the process has ended; the read below raises JavaError
                    if not unsent:
                        selector.unregister(process.stdin)
                    continue
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    # `wait` raises TimeoutExpired if the process has closed its output and still runs.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        raise JavaError(f"java ended early with exit code {process.wait(timeout=1)}")
                    raise JavaError("java ended early")
                *lines, buffer = (buffer + chunk).split(b"\n")
                if len(buffer) > _CHUNK:
                    raise JavaError(f"java answered what is not a score: {buffer[:60]!r}...")
                for line in lines[:answers]:
                    answers -= 1
                    yield line.decode(errors="replace").strip()
                    deadline = min(until, time.monotonic() + SILENCE_S)


def finish(process: subprocess.Popen[bytes], until: float) -> None:
    """Waits for the process. Raises JavaError when it is still running at `until` or its exit code is not 0."""
    try:
        code = process.wait(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise JavaError("java was not ready within the deadline") from None
    if code:
        raise JavaError(f"java ended with exit code {code}")


def with_one_restart(attempt: Callable[[Path, float], T], deadline_s: float) -> T:
    """Calls `attempt(folder, until)` at most twice within the deadline; the first call gets two thirds of it."""
    start = time.monotonic()
    reasons: list[str] = []
    for share in (2 / 3, 1):  # the share of the deadline after which the attempt must have ended
        with tempfile.TemporaryDirectory(prefix="raycap-java-") as name:
            try:
                return attempt(Path(name), start + deadline_s * share)
            except JavaError as error:
                reasons.append(f"{error}{_stderr_excerpt(Path(name))}")
    second_reason = "the same again" if reasons[0] == reasons[1] else reasons[1]
    raise JavaError(f"{reasons[0]}; after one restart: {second_reason}")


def _stderr_excerpt(folder: Path) -> str:
    """The first line of stderr that names an error; without such a line, the first line."""
    with (folder / "stderr.txt").open("rb") as file:
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Exception" in line or "Error:" in line or "OutOfMemory" in line]
    return f"; stderr: {(errors or lines)[0].strip()[:300]}" if lines else ""
