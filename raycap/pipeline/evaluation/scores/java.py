"""METEOR and SPICE: Java programs in the package pycocoevalcap.

Their heap fits the free memory, and their processes never outlive the call that started them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

Caption = Sequence[str]  # tokens

SPICE_CATEGORIES = {
    "Object": "object",
    "Attribute": "attribute",
    "Relation": "relation",
    "Color": "color",
    "Cardinality": "count",
    "Size": "size",
}
SPICE_MODELS_VARIABLE = "RAYCAP_SPICE_MODELS"  # the folder with the two jars below
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")

# The smallest and largest Java heap in MB. METEOR's paraphrase table needs more than 512 MB. pycocoevalcap always uses
# the largest heap.
_METEOR_HEAP_MB = (640, 2048)
_SPICE_HEAP_MB = (3072, 8192)
# METEOR answers a caption with a line of more than ten numbers, and the final request with lines of one number.
_STATISTICS = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?( -?\d+(\.\d+)?(E-?\d+)?){10,}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?")
SILENCE_S = 300.0  # longest wait for a line; METEOR loads tables for 5 s, or much longer on an overloaded machine
_CHUNK = 65536  # bytes that are written or read at once; a longer answer is not a score


def check_meteor() -> None:
    """Raises JavaError when METEOR cannot run on this machine."""
    java_command(_METEOR_HEAP_MB)


def check_spice() -> None:
    """Raises JavaError when SPICE cannot run on this machine."""
    java_command(_METEOR_HEAP_MB)
    spice_models()


def meteor(
    predictions: Sequence[Caption], references: Sequence[Sequence[Caption]], deadline_s: float | None
) -> tuple[float, list[float]]:
    """METEOR 1.5 (English, normalized) of tokenized captions: the score over all images, and that of each image.

    After a failure the process is restarted once, and scores only the images without an answer. deadline_s: by default
    120 s plus 50 ms per image. Raises JavaError.
    """
    jar = _package_folder() / "meteor" / "meteor-1.5.jar"
    command = java_command(_METEOR_HEAP_MB, "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm")
    if not jar.is_file():
        raise JavaError(f"{jar.name} is missing from the package pycocoevalcap; install it again")

    def to_text(tokens: Caption) -> str:
        return " ".join(tokens).replace("|||", "")  # METEOR separates captions by |||

    requests = [
        " ||| ".join(("SCORE", *map(to_text, captions), to_text(prediction)))
        for prediction, captions in zip(predictions, references, strict=True)
    ]
    statistics: list[str] = []

    def attempt(folder: Path, until: float) -> tuple[float, list[float]]:
        """Asks one METEOR process for the missing statistics, and then for the scores that follow from all of them."""
        with java_process(command, folder, talks=True) as process:
            for line in talk(process, requests[len(statistics) :], len(requests) - len(statistics), until):
                statistics.append(_checked(line, _STATISTICS))
            evaluation = " ||| ".join(("EVAL", *statistics))
            lines = talk(process, [evaluation], len(requests) + 1, until)
            *per_image, value = [float(_checked(line, _NUMBER)) for line in lines]
        return value, per_image

    return with_one_restart(attempt, 120 + 0.05 * len(requests) if deadline_s is None else deadline_s)


def _checked(line: str, pattern: re.Pattern[str]) -> str:
    """Returns a line of METEOR's output. Raises JavaError if it does not match the pattern."""
    if not pattern.fullmatch(line):
        raise JavaError(f"java answered what is not a score: {line[:60]!r}")
    return line


def spice(
    predictions: Sequence[Caption], references: Sequence[Sequence[Caption]], deadline_s: float | None
) -> tuple[list[float], dict[str, float | None]]:
    """SPICE 1.0 of tokenized captions: the F-score of each image, and the mean F-score of each sub-category.

    The mean is over the images whose caption or references mention the category; None when no image does.
    deadline_s: by default 300 s plus 1 s per image. Raises JavaError.
    """
    folder = _package_folder() / "spice"
    java = java_command(_SPICE_HEAP_MB)
    models = spice_models()
    # SPICE's serializer needs access to these packages, which Java forbids by default since version 16.
    opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in ("lang", "util", "math")]
    paths = os.pathsep.join(map(str, (folder / "spice-1.0.jar", folder / "lib" / "*", models / "*")))
    data = [
        {"image_id": i, "test": " ".join(prediction), "refs": [" ".join(caption) for caption in captions]}
        for i, (prediction, captions) in enumerate(zip(predictions, references, strict=True))
    ]

    def attempt(temporary: Path, until: float) -> list[dict[str, dict[str, Any]]]:
        """Runs SPICE once. For each image, the result has the scores {category: {"f": ...}}; "All" is the total."""
        source, target = temporary / "in.json", temporary / "out.json"
        source.write_text(json.dumps(data), encoding="utf-8")
        options = ["-XX:+IgnoreUnrecognizedVMOptions", *opens, "-cp", paths]
        main = ["edu.anu.spice.SpiceScorer", str(source), "-out", str(target), "-subset", "-silent"]
        with java_process([*java, *options, *main], temporary, talks=False) as process:
            finish(process, until)
        try:
            items = {item["image_id"]: item["scores"] for item in json.loads(target.read_text(encoding="utf-8"))}
            return [items[image] | {"All": {"f": float(items[image]["All"]["f"])}} for image in range(len(data))]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JavaError(f"java left no readable result ({type(error).__name__}: {error})") from error

    scores_by_image = with_one_restart(attempt, 300 + len(data) if deadline_s is None else deadline_s)
    categories = {name: _mean_f(scores_by_image, category) for category, name in SPICE_CATEGORIES.items()}
    return [scores["All"]["f"] for scores in scores_by_image], categories


def _mean_f(images: Sequence[dict[str, dict[str, Any]]], category: str) -> float | None:
    """Mean F-score of a category over the images that have a finite one."""
    values = [float(scores[category]["f"]) for scores in images if (scores.get(category) or {}).get("f") is not None]
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else None


def spice_models() -> Path:
    """The folder with SPICE's parser models. Raises JavaError with the remedy when they are missing."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raycap" / "spice"
    candidates = [Path(os.environ.get(SPICE_MODELS_VARIABLE) or default), _package_folder() / "spice" / "lib"]
    for folder in candidates:
        if all((folder / jar).is_file() for jar in SPICE_MODELS):
            return folder.absolute()
    remedy = f"run `make spice`, or name the folder that holds {' and '.join(SPICE_MODELS)} in {SPICE_MODELS_VARIABLE}"
    raise JavaError(f"SPICE's parser models are not in {candidates[0]}; {remedy}")


def _package_folder() -> Path:
    """The folder of the package pycocoevalcap. Raises JavaError when it is not installed."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise JavaError("the package pycocoevalcap, which contains the jar, is not installed; install it")
    return Path(next(iter(spec.submodule_search_locations)))


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
