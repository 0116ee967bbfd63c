"""Runs fuzz targets. Each case runs in a forked child, with limits on time, memory and on what it may touch.

python -m tests.support.fuzzing TARGET FOLDER SEED FIRST LAST    runs these cases; prints a `Report` as JSON

A case is right if it succeeds, or fails with an error that the command line turns into one sentence. It is wrong if
another exception escapes, if the message is not one short printable line, if the case hangs, kills its process, needs
too much memory, writes outside of its folder or leaves a part of a file there, if it starts a program, opens a
connection, looks up a global of a pickle, or opens the file `bait`, which no valid input names.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ValidationError

from raycap.pipeline.data.images import BadImage
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.storage.s3 import StorageError

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 20.0
CASES_PER_CHILD = 250
MAX_DEATHS = 6  # a target ends after so many cases that hung or killed their process
MAX_MESSAGE = 2_000  # characters
ADDRESS_SPACE = 4 * 2**30  # bytes that a child may map in addition, so that a failing test does not fill the machine
BAIT, RESULTS = "bait", "results.jsonl"
STRANGERS = (UnicodeError, json.JSONDecodeError, ValidationError)  # are ValueErrors, which some targets may raise
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
FORBIDDEN = dict.fromkeys(PROGRAMS, "starts a program") | {
    "socket.connect": "opens a connection",
    "pickle.find_class": "looks up a global of a pickle",
}
WRITES = (
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
)


@dataclass(frozen=True)
class Case:
    """One case: its number, its generator, and its empty working folder below `sandbox`."""

    number: int
    random: Random
    folder: Path
    sandbox: Path

    @property
    def bait(self) -> Path:
        """A file that no input may lead to."""
        return self.sandbox / BAIT


@dataclass(frozen=True)
class Target:
    """A part of raycap that reads input from elsewhere.

    inputs: makes valid inputs in a folder, once. case: writes a hostile one into the case's folder and returns the call
    to try. refusals: the errors that the target may raise. writes: what it may leave below the case's folder although
    it has failed, as the first parts of paths.
    """

    inputs: Callable[[Path], Any]
    case: Callable[[Any, Case], Callable[[], object]]
    num_cases: int
    refusals: tuple[type[Exception], ...] = (UserError, JobFailedError, BadImage, StorageError, OSError)
    writes: tuple[str, ...] = ()
    starts_programs: bool = False
    max_bytes: int = 3 * 2**29


@dataclass(frozen=True)
class Result:
    """What a case did. problem: a sentence, or "" if the case is right; `where` is the place in raycap's code."""

    number: int
    kind: str
    problem: str = ""
    where: str = ""
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass
class Report:
    """The results of a target."""

    target: str
    seed: int
    seconds: float = 0.0
    results: list[Result] = field(default_factory=list)

    @property
    def problems(self) -> list[Result]:
        return [result for result in self.results if result.problem]

    def __str__(self) -> str:
        counts = Counter(each.kind for each in self.results).most_common()
        slowest = max(self.results, key=lambda each: each.seconds)
        largest = max(self.results, key=lambda each: each.num_bytes)
        lines = [
            f"\nfuzz {self.target}: {len(self.results)} cases in {self.seconds:.0f} s: "
            f"{', '.join(f'{count} {kind}' for kind, count in counts)}; {len(self.problems)} wrong; "
            f"slowest {slowest.seconds:.1f} s (case {slowest.number}), "
            f"most memory {largest.num_bytes / 2**20:.0f} MiB (case {largest.number})"
        ]
        groups: dict[tuple[str, str, str], list[Result]] = {}
        for each in self.problems:
            groups.setdefault((each.kind, each.where, each.problem.partition(": ")[0]), []).append(each)
        for (kind, where, _), group in sorted(groups.items(), key=lambda item: -len(item[1])):
            again = f"RAYCAP_FUZZ_SEED={self.seed} RAYCAP_FUZZ_CASE={group[0].number}"
            place = f" at {where}" if where else ""
            lines.append(f"  {len(group)} x {kind}{place}, {again}: {group[0].problem[:300]!r}")
        return "\n".join(lines)


def fuzz(name: str, folder: Path, seed: int, numbers: range) -> Report:
    """Runs cases of the target `name` in a fresh process, whose home and caches are below `folder`."""
    sandbox, shows_output = folder / "sandbox", len(numbers) == 1
    own = {"HOME": "home", "RAYCAP_CACHE": "cache", "TMPDIR": "tmp"}
    for path in own.values():
        (sandbox / path).mkdir(parents=True)
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # forks have one
    variables |= {key: str(sandbox / path) for key, path in own.items()}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    words = [name, str(folder), str(seed), str(numbers[0]), str(numbers[-1])]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fuzzing", *words],
        cwd=sandbox,
        env=os.environ | variables,
        stderr=None if shows_output else subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = [Result(**json.loads(line)) for line in (folder / RESULTS).read_text().splitlines()]
    return Report(name, seed, time.monotonic() - begin, results)


def run_cases(
    target: Target, inputs: Any, sandbox: Path, generator_name: str, numbers: Sequence[int]
) -> Iterator[Result]:
    """The results of the cases. After a case that hung or killed its process, a new child runs the next one."""
    waiting, num_deaths = list(numbers), 0
    while waiting and num_deaths < MAX_DEATHS:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                _child(target, inputs, sandbox, generator_name, waiting[:CASES_PER_CHILD], writer)
                os._exit(0)
            except BaseException:  # the fuzzer itself failed
                traceback.print_exc()
                os._exit(3)
        os.close(writer)
        ending = ""
        for result in _received(reader):
            if result is None:
                ending = f"no end after {HANG_S:g} s"
                break
            waiting.pop(0)
            yield result
        os.close(reader)
        if ending:
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status:
            num_deaths += 1
            code = os.waitstatus_to_exitcode(status)
            yield Result(waiting.pop(0), "hang" if ending else "death", ending or f"its process ended with {code}")


def _received(reader: int) -> Iterator[Result | None]:
    """The results that a child sends; None when it has sent none for HANG_S."""
    rest = b""
    while True:
        if not select.select([reader], [], [], HANG_S)[0]:
            yield None
            return
        data = os.read(reader, 2**16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield Result(**json.loads(line))


def _child(target: Target, inputs: Any, sandbox: Path, name: str, numbers: Sequence[int], writer: int) -> None:
    """Runs cases and sends their results."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, resource.RLIM_INFINITY))
    watch = Watch(sandbox, target)
    sys.addaudithook(watch)
    for number in numbers:
        folder = sandbox / f"cases/{number}"
        folder.mkdir(parents=True)
        os.chdir(folder)
        case = Case(number, Random(f"{name} {number}"), folder, sandbox)
        result = _run_case(target, inputs, case, watch, verbose=len(numbers) == 1)
        os.chdir(sandbox)
        shutil.rmtree(folder, ignore_errors=True)
        os.write(writer, json.dumps(asdict(result)).encode() + b"\n")


def _run_case(target: Target, inputs: Any, case: Case, watch: Watch, verbose: bool) -> Result:
    attempt = target.case(inputs, case)
    before, elsewhere = _listing(case.folder), _listing(case.sandbox, skip=("cases", "cache"))
    os.utime(case.bait, ns=(0, case.bait.stat().st_mtime_ns))  # the next read sets the time of access
    start_bytes, begin = _start_peak(), time.monotonic()
    kind, problem, where = "success", "", ""
    with watch.on(case.folder):
        try:
            attempt()
        except BaseException as error:
            kind, problem, where = _judge(error, target, case)
            if verbose:
                traceback.print_exc()
    seconds, num_bytes = time.monotonic() - begin, max(0, _peak() - start_bytes)
    new = sorted(name for name in _listing(case.folder).keys() - before.keys() if not name.startswith(target.writes))
    checks = [
        ("touched", bool(watch.seen), watch.seen),
        ("touched", case.bait.stat().st_atime > 0, "reads the bait"),
        ("touched", _listing(case.sandbox, skip=("cases", "cache")) != elsewhere, "writes outside of its folder"),
        ("memory", num_bytes > target.max_bytes, f"needs {num_bytes / 2**20:.0f} MiB"),
        ("half-written", any(name.endswith(".tmp") for name in new), f"leaves {new[:3]}"),
        ("half-written", bool(new) and kind != "success", f"leaves {new[:3]} after a refusal"),
    ]
    for name, is_wrong, text in checks:
        if is_wrong and not problem:
            kind, problem = name, text
    return Result(case.number, kind, problem, where, round(seconds, 3), num_bytes)


def _judge(error: BaseException, target: Target, case: Case) -> tuple[str, str, str]:
    """The kind of an outcome, what is wrong with it, and where in raycap's code it was raised."""
    name, where = type(error).__name__, _place(error)
    if not isinstance(error, target.refusals) or isinstance(error, STRANGERS):
        return "escaped", f"{name}: {error!s:.500}", where
    text = str(error)
    if isinstance(error, JobFailedError | OSError):
        text = " ".join(text.split())  # as `jobs.cli.main` does
    problems = {
        "has no text": not text,
        "is not one printable line": not text.isprintable(),
        f"has {len(text)} characters": len(text) > MAX_MESSAGE,
        "names no file": type(error) is not StorageError
        and isinstance(error, OSError)
        and error.filename is None
        and str(case.folder) not in text,
    }
    found = ", ".join(problem for problem, is_so in problems.items() if is_so)
    return (f"message of {name}", f"{found}: {text[:500]}", where) if found else (name, "", where)


def _place(error: BaseException) -> str:
    """The innermost place of a traceback that is in raycap's code."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [code for code in codes if code.co_filename.startswith(f"{ROOT}/raycap/")]
    return f"{Path(ours[-1].co_filename).relative_to(ROOT / 'raycap')}:{ours[-1].co_name}" if ours else ""


class Watch:
    """An audit hook that refuses what a case must not do, while it is on. `seen`: the first such act."""

    def __init__(self, sandbox: Path, target: Target) -> None:
        self.sandbox, self.target, self.folder, self.seen = sandbox, target, sandbox, ""
        self.is_on = False

    def on(self, folder: Path) -> Watch:
        self.folder, self.seen = folder, ""
        return self

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        self.is_on = False  # the checks below also cause events
        act = self._act(event, arguments)
        self.is_on = True
        if act:
            self.seen = self.seen or f"{act}: {arguments!r:.200}"
            raise PermissionError(f"the fuzzer refuses: {act}")

    def _act(self, event: str, arguments: tuple[Any, ...]) -> str:
        if event in FORBIDDEN:
            return "" if self.target.starts_programs else FORBIDDEN[event]
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(arguments[0]))
            if path == self.sandbox / BAIT:
                return "opens the bait"
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            return (
                "" if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or self._may_write(path) else "writes outside"
            )
        if event in WRITES and isinstance(arguments[0], str | bytes | os.PathLike):
            return "" if self._may_write(Path(os.fsdecode(arguments[0]))) else "changes a file outside"
        return ""

    def _may_write(self, path: Path) -> bool:
        allowed = (self.folder, self.sandbox / "cache", Path("/dev/null"))
        return any(Path(os.path.normpath(self.folder / path)).is_relative_to(each) for each in allowed)


def _listing(folder: Path, skip: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """{relative path: (size, modification time)} of everything below a folder, without the subfolders `skip`."""
    entries = {}
    for parent, folders, files in os.walk(folder):
        if parent == str(folder):
            folders[:] = [name for name in folders if name not in skip]
        for name in (*folders, *files):
            status = os.lstat(os.path.join(parent, name))  # noqa: PTH118
            is_folder = name in folders
            entries[os.path.relpath(f"{parent}/{name}", folder)] = (
                (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
            )
    return entries


def _start_peak() -> int:
    """Resets the largest memory of this process, and returns the present one in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    """An entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> int:
    from tests.support.fuzz_targets import TARGETS

    name, folder, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    sandbox = folder / "sandbox"
    numbers = range(int(sys.argv[4]), int(sys.argv[5]) + 1)
    target = TARGETS[name]
    (sandbox / "inputs").mkdir()
    (sandbox / BAIT).write_text("no input leads here " * 100)
    inputs = target.inputs(sandbox / "inputs")
    with (folder / RESULTS).open("w") as file:
        for result in run_cases(target, inputs, sandbox, f"{name} {seed}", numbers):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
