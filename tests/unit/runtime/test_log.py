"""The log: levels, prefixes, its file, lines about progress; and decorations, whose failures are only recorded."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import (
    PACKAGE,
    Decorations,
    configure_logging,
    log_file,
    log_to_stderr,
    progress,
    set_rank,
)

LOGGER = logging.getLogger("raycap.pipeline.example")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Handlers, levels and the rank are as before when the test is over."""
    logger = logging.getLogger(PACKAGE)
    level, handlers = logger.level, list(logger.handlers)
    logger.handlers.clear()
    yield
    set_rank(0)
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_the_log_of_a_command_whose_output_is_read_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    log_to_stderr()
    LOGGER.warning("S3 is slow")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "warning   S3 is slow\n")
    configure_logging()
    LOGGER.info("of the next command")
    assert capsys.readouterr().out == "of the next command\n"


def test_the_terminal_shows_levels_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    LOGGER.debug("not shown")
    LOGGER.info("plain\n\nsecond line")
    LOGGER.warning("careful\nmore")
    set_rank(3)
    LOGGER.error("broken")
    assert capsys.readouterr().out.splitlines() == [
        "plain",
        "",
        "second line",
        "warning   careful",
        "warning   more",
        "[rank 3] error     broken",
    ]


def test_names_in_records_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    with log_file(tmp_path / "run.log"):
        LOGGER.info("a\x1b[2J\x1b]0;owned\x07.png\rb\u202e ü 猫")
    expected = r"a\x1b[2J\x1b]0;owned\x07.png\rb\u202e ü 猫"
    assert capsys.readouterr().out == f"{expected}\n"
    assert (tmp_path / "run.log").read_text(encoding="utf-8").endswith(f"{expected}\n")


def test_the_file_has_times_levels_and_what_the_terminal_hides(tmp_path: Path) -> None:
    path = tmp_path / "log" / "run.log"
    configure_logging(logging.WARNING)
    with log_file(path):
        LOGGER.info("first\nsecond")
        set_rank(1)
        LOGGER.warning("\udcff is not UTF-8")
    with log_file(path):
        LOGGER.info("appended")
    LOGGER.info("after the block")
    patterns = ["INFO    first", "INFO    second"]
    patterns += [r"WARNING \[rank 1\] \\udcff is not UTF-8", r"INFO    \[rank 1\] appended"]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(f"{TIME} {pattern}", line), line


@pytest.mark.parametrize("error", [UserError("key a: found 1"), ZeroDivisionError("a bug")])
def test_the_file_ends_with_the_error(error: Exception, tmp_path: Path) -> None:
    configure_logging()
    with pytest.raises(type(error)), log_file(tmp_path / "run.log"):
        raise error
    text = (tmp_path / "run.log").read_text()
    assert f"ERROR   stopped by {type(error).__name__}: {error}" in text
    assert ("Traceback" in text) == (not isinstance(error, UserError)), "a mistake of the caller needs no traceback"


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    clock = iter([0.0, 1.0, 4.0, 6.0, 7.0, 0.0, 9.0, 15.0])
    monkeypatch.setattr("raycap.pipeline.runtime.log.time.monotonic", lambda: next(clock))
    with progress("captions", 40) as advance:
        for _ in range(4):
            advance(10)
    assert capsys.readouterr().out == "captions  30/40 images, 4.0 images/s, 2 s left\n"
    with progress("captions", 40) as advance:
        for _ in range(2):
            advance(10)
    late = "captions  10/40 images\ncaptions  20/40 images, 1.7 images/s, 12 s left\n"
    assert capsys.readouterr().out == late, "the first images come after the start of processes"


def test_a_failure_is_recorded_with_its_reason_and_said_in_one_line(log_lines: list[str]) -> None:
    decorations = Decorations()
    with decorations.making("the plot"):
        raise ZeroDivisionError("no\nrange")
    with decorations.making("the page"):
        pass
    wrapped = RuntimeError("a long traceback")
    wrapped.cause = ValueError("no grid")  # type: ignore[attr-defined]  # as Ray's errors have it
    with decorations.making("the maps"):
        raise wrapped
    with decorations.making("the pictures"):
        raise RayTaskError("task", "Traceback ...", UserError("this node has no GPU")).as_instanceof_cause()
    assert decorations.failed == {
        "the plot": "ZeroDivisionError: no range",
        "the maps": "ValueError: no grid",
        "the pictures": "UserError: this node has no GPU",
    }
    decorations.log_failed()
    assert log_lines[0] == ("the plot could not be made (ZeroDivisionError: no range); the same command makes it again")
    assert len(log_lines) == 3


@pytest.mark.parametrize("error", [UserError("model.num_heads is 3; give 4"), KeyboardInterrupt()])
def test_mistakes_of_the_user_and_ctrl_c_pass_through(error: BaseException) -> None:
    decorations = Decorations()
    with pytest.raises(type(error)), decorations.making("the page"):
        raise error
    assert not decorations.failed
