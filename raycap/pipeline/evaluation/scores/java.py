"""METEOR and SPICE, computed by the Java programs in the package pycocoevalcap.

The Java heap is adapted to the free memory, and each process ends with the call that started it.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from raycap.pipeline.errors import UnavailableError
from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.processor import free_memory_mb
from raycap.pipeline.storage.atomic import write_bytes
from raycap.pipeline.storage.path import cache_folder

logger = logging.getLogger(__name__)
Caption = Sequence[str]  # tokens

SPICE_MODELS_VARIABLE = "RAYCAP_SPICE_MODELS"  # the folder with the two jars below
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")

# The smallest and largest Java heap in MB. METEOR's smallest heap fits its paraphrase table, which needs more than
# 512 MB. The largest heaps are those that pycocoevalcap always uses.
_METEOR_HEAP_MB = (640, 2048)
_SPICE_HEAP_MB = (3072, 8192)
# METEOR answers each caption with a line of more than ten numbers, and the final request with lines of one number, so
# any other line is an error.
_STATISTICS = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?( -?\d+(\.\d+)?(E-?\d+)?){10,}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(E-?\d+)?")
# A deadline is (seconds per process, further seconds per image)
METEOR_DEADLINE_S, SPICE_DEADLINE_S = (120.0, 0.05), (300.0, 1.0)
# Parses each line, a JSON list of sentences, into SPICE's database. SPICE's own command shows no progress.
PARSE_SCRIPT = """
var Parser = Java.type("edu.anu.spice.SpiceParser");
var parser = new Parser("parsed", java.lang.Runtime.getRuntime().availableProcessors(), true);
var input = new java.io.BufferedReader(new java.io.InputStreamReader(java.lang.System.in));
for (var line; (line = input.readLine()) !== null; print("parsed"))
    parser.parseCaptions(java.util.Arrays.asList(Java.to(JSON.parse(line), "java.lang.String[]")));
"""
KEEP_EVERY_S, MOST_KEPT_BYTES = 30.0, 2**28  # a larger file of parsed sentences is replaced by a new one
_LONGEST = 65536  # characters read per line; a line of scores is shorter


def check_meteor() -> None:
    """Raises UnavailableError if METEOR cannot run on this machine."""
    java_command(_METEOR_HEAP_MB)


def check_spice() -> None:
    """Raises UnavailableError if SPICE cannot run on this machine."""
    check_meteor()
    spice_models()


def meteor(predictions: Sequence[Caption], references: Sequence[Sequence[Caption]]) -> tuple[float, list[float]]:
    """METEOR 1.5 (English, normalized) of tokenized captions: the score over all images, and the score of each image.

    Raises UnavailableError if Java fails or gives no result before the deadline.
    """
    jar = _package_folder() / "meteor" / "meteor-1.5.jar"
    command = java_command(_METEOR_HEAP_MB, "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm")

    def to_text(tokens: Caption) -> str:
        return " ".join(tokens).replace("|||", "")  # because METEOR separates captions by |||

    requests = [
        " ||| ".join(("SCORE", *map(to_text, captions), to_text(prediction)))
        for prediction, captions in zip(predictions, references, strict=True)
    ]

    def talk(process: subprocess.Popen[str]) -> tuple[float, list[float]]:
        statistics = _answers(process, requests, len(requests), _STATISTICS)
        evaluation = " ||| ".join(("EVAL", *statistics))
        *per_image, value = map(float, _answers(process, [evaluation], len(requests) + 1, _NUMBER))
        return value, per_image

    with tempfile.TemporaryDirectory(prefix="raycap-java-") as folder:
        return _with_java(command, Path(folder), talk, METEOR_DEADLINE_S[0] + METEOR_DEADLINE_S[1] * len(requests))


def spice(predictions: Sequence[Caption], references: Sequence[Sequence[Caption]]) -> list[float]:
    """SPICE 1.0 of tokenized captions: the F-score of each image. Raises UnavailableError like `meteor`.

    Parsed sentences are kept in the user's cache. If that fails, a warning gives the reason, and all are parsed again.
    """
    images = [tuple(map(" ".join, (caption, *refs))) for caption, refs in zip(predictions, references, strict=True)]
    distinct = list(dict.fromkeys(images))
    sentences = list(dict.fromkeys(sentence for image in distinct for sentence in image))
    package = _package_folder() / "spice"
    java = java_command(_SPICE_HEAP_MB)
    # SPICE's serializers need access to these packages, which Java forbids by default since version 16.
    names = ("lang", "util", "util.concurrent", "math", "net", "text")
    opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in names]
    paths = os.pathsep.join(map(str, (package / "spice-1.0.jar", package / "lib" / "*", spice_models() / "*")))
    java += ["-XX:+IgnoreUnrecognizedVMOptions", *opens, "-cp", paths]
    items = [{"image_id": i, "test": test, "refs": refs} for i, (test, *refs) in enumerate(distinct)]
    main = [*java, "edu.anu.spice.SpiceScorer", "in.json", "-out", "out.json", "-subset", "-silent"]
    deadline_s = SPICE_DEADLINE_S[0] + SPICE_DEADLINE_S[1] * len(images)
    with tempfile.TemporaryDirectory(prefix="raycap-java-") as name:
        folder = Path(name)
        (folder / "in.json").write_text(json.dumps(items), encoding="utf-8")

        def wait(process: subprocess.Popen[str]) -> dict[tuple[str, ...], float]:
            process.communicate()
            if process.returncode:
                raise ValueError(f"it ended with exit code {process.returncode}")
            scores = {item["image_id"]: item["scores"] for item in json.loads((folder / "out.json").read_text("utf-8"))}
            return {image: float(scores[i]["All"]["f"]) for i, image in enumerate(distinct)}

        try:
            _parse(java, folder, sentences, deadline_s)
            values = _with_java([*main, "-cache", "parsed"], folder, wait, deadline_s)
        except UnavailableError as error:  # the script needs Java 11, and the database a library for the processor
            logger.warning(f"SPICE   runs without its cache, so all sentences are parsed again: {error}")
            values = _with_java(main, folder, wait, deadline_s)
    return [values[image] for image in images]


def _parse(java: list[str], folder: Path, sentences: list[str], deadline_s: float) -> None:
    """Adds the parses of sentences to SPICE's database `folder`/parsed, a copy of the file in the user's cache.

    Only this call uses the database itself. So a killed call leaves a whole file, a cache on a network disk does no
    harm, and of two calls at the same time the file has the sentences of the one that ends last.
    """
    kept, database = cache_folder() / "spice" / "parsed.gz", folder / "parsed" / "data.mdb"
    database.parent.mkdir()
    try:
        if kept.exists():
            if (found := kept.stat()).st_size > MOST_KEPT_BYTES or found.st_uid != os.geteuid():
                raise ValueError("it is too large or belongs to another user")  # whose Java objects could run code
            database.write_bytes(gzip.decompress(kept.read_bytes()))  # compares a checksum
    except Exception as error:  # a damaged file raises errors of several types
        logger.warning(f"SPICE   {kept} is not used, and its sentences are parsed again: {one_line(error)}")
    database.touch()
    (folder / "parse.js").write_text(PARSE_SCRIPT)

    def talk(process: subprocess.Popen[str]) -> None:
        start = last = time.monotonic()
        size, old, can_keep = 100 * (os.cpu_count() or 1), database.stat().st_mtime_ns, True
        for done in range(0, len(sentences), size):
            _answers(process, [json.dumps(sentences[done : done + size])], 1, re.compile("parsed"))
            now, left = time.monotonic(), max(0, len(sentences) - done - size)
            if done == 0:
                start = now  # the parser has loaded its models
            if (left and now - last < KEEP_EVERY_S) or database.stat().st_mtime_ns == old:
                continue
            last, minutes = now, f", {(now - start) / done * left / 60:.1f} min left" if done else ""
            logger.info(f"SPICE   {len(sentences) - left}/{len(sentences)} sentences parsed{minutes}")
            try:
                if can_keep:
                    write_bytes(kept, gzip.compress(database.read_bytes(), 1), durable=False)
            except OSError as error:
                can_keep = False
                logger.warning(f"SPICE   parsed sentences are not kept for later calls: {one_line(error)}")

    _with_java([*java, "org.openjdk.nashorn.tools.Shell", "parse.js"], folder, talk, deadline_s)


def spice_models() -> Path:
    """The folder with SPICE's parser models. Raises UnavailableError with the remedy if the models are missing."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raycap" / "spice"
    candidates = [Path(os.environ.get(SPICE_MODELS_VARIABLE) or default), _package_folder() / "spice" / "lib"]
    for folder in candidates:
        if all((folder / jar).is_file() for jar in SPICE_MODELS):
            return folder.absolute()
    remedy = f"run `make spice`, or name the folder that holds {' and '.join(SPICE_MODELS)} in {SPICE_MODELS_VARIABLE}"
    raise UnavailableError(f"SPICE's parser models are not in {candidates[0]}; {remedy}")


def _package_folder() -> Path:
    """The folder of the package pycocoevalcap. Raises UnavailableError if the package is not installed."""
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError("the package pycocoevalcap, which contains the jar, is not installed; install it")
    return Path(next(iter(spec.submodule_search_locations)))


T = TypeVar("T")


def java_version() -> str:
    """The first line of `java -version`. Raises UnavailableError if java is missing or does not start."""
    java = java_command(_METEOR_HEAP_MB)[0]
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{java} does not start: {error}") from error
    if done.returncode:
        raise UnavailableError(f"{java} -version ends with exit code {done.returncode}")
    return next(iter((done.stderr or done.stdout).strip().splitlines()), "java")


def java_command(heap_mb: tuple[int, int], *options: str) -> list[str]:
    """The start of a Java command, with these options and a heap of half the free memory.

    heap_mb: (smallest, largest) heap. Raises UnavailableError if java is missing or the free memory is too small.
    """
    java = shutil.which("java")
    if java is None:
        raise UnavailableError("java not found on the PATH; install a Java runtime (version 8 or later)")
    smallest, largest = heap_mb
    free = free_memory_mb()
    if free < smallest * 1.25:  # 25 % more, because Java also needs memory outside its heap
        raise UnavailableError(f"it needs a Java heap of {smallest} MB, and only {free:.0f} MB of memory are free")
    heap = int(min(largest, max(smallest, free / 2)))
    # The encoding is set, because its default depends on the locale before Java 18.
    return [java, f"-Xmx{heap}m", "-Dfile.encoding=UTF-8", *options]


def _with_java(command: list[str], folder: Path, use: Callable[[subprocess.Popen[str]], T], deadline_s: float) -> T:
    """Starts a Java process in `folder`, and returns the result of `use(process)`.

    The process is killed after `use` returns, or at the deadline. Raises UnavailableError if java does not start or
    `use` fails.
    """
    try:
        with (folder / "stderr.txt").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
                process_group=0,  # lets `kill` end child processes too, because java may be a wrapper script
            )
    except OSError as error:
        raise UnavailableError(f"java could not be started: {error}") from error

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    deadline = time.monotonic() + deadline_s
    timer = threading.Timer(deadline_s, kill)
    timer.start()
    try:
        return use(process)
    except (OSError, ValueError, KeyError, TypeError) as error:
        is_late = time.monotonic() >= deadline
        reason = "java gave no answer within the deadline" if is_late else f"java failed ({one_line(error)})"
        raise UnavailableError(f"{reason}{_stderr_excerpt(folder)}") from error
    finally:
        timer.cancel()
        kill()
        with contextlib.suppress(OSError, ValueError):  # errors do not matter here: `use` has the result or has failed
            process.communicate()


def _answers(
    process: subprocess.Popen[str], requests: Sequence[str], count: int, pattern: re.Pattern[str]
) -> list[str]:
    """Writes the requests as lines, and returns the next `count` lines that the process prints.

    A thread writes, because the process may fill its output before it has read all requests. Raises ValueError if a
    line does not match the pattern, or if the process ends early.
    """
    assert process.stdin is not None and process.stdout is not None
    stdin, lines = process.stdin, list[str]()

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # if the process has ended, the reader raises the error
            stdin.writelines(f"{request}\n" for request in requests)
            stdin.flush()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while len(lines) < count:
        line = process.stdout.readline(_LONGEST)
        if not line:
            raise ValueError(f"it ended early with exit code {process.wait()}")
        if not pattern.fullmatch(line.strip()):
            raise ValueError(f"it answered what is not a score: {line[:60]!r}")
        lines.append(line.strip())
    writer.join()
    return lines


def _stderr_excerpt(folder: Path) -> str:
    """The first line of stderr that names an error, or else its first line, for messages."""
    with (folder / "stderr.txt").open("rb") as file:
        lines = [line for line in file.read(1 << 20).decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Exception" in line or "Error:" in line or "OutOfMemory" in line]
    return f"; stderr: {(errors or lines)[0].strip()[:300]}" if lines else ""
