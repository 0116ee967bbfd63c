"""The command line: its tables, its help, its exit codes and what it imports."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from ray.exceptions import RayTaskError

from raycap.jobs.cli import BENCHMARKS, COMMANDS, Entry, main
from raycap.pipeline.errors import JobFailedError, UserError
from tests.conftest import ROOT

ENTRIES = {**COMMANDS, **{f"bench {name}": entry for name, entry in BENCHMARKS.items()}}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_row_of_the_tables_is_true(name: str) -> None:
    command = ENTRIES[name].load(name)
    assert command.help and command.help.splitlines()[0] == ENTRIES[name].summary
    assert f"Example: raycap {name}" in command.help
    arguments = [parameter.name for parameter in command.params if parameter.param_type_name == "argument"]
    assert (arguments == ["config"] or name == "caption") == ENTRIES[name].can_submit
    assert all(getattr(parameter, "help", None) for parameter in command.params)


def test_the_help_lists_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys; from raycap.jobs.cli import main; assert main(sys.argv[1:]) == 0\n"
        "loaded = {'torch', 'ray', 'numpy', 'pyarrow', 'yaml', 'raycap.jobs.run'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    for words, names in ((["--help"], [*COMMANDS, "bench"]), (["bench", "--help"], BENCHMARKS)):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        listed = done.stdout.partition("Commands:")[2]
        assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ")] == list(names)


def test_wrong_command_lines_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["trian"], "No such command 'trian'"),
        (["scor"], "Did you mean 'score'"),
        (["score", "--reference", "a"], "No such option: --reference"),
        (["bench", "gpuu"], "Did you mean 'gpu'"),
        (["submit", "trian"], "'trian' cannot be submitted; one of caption"),
        (["submit", "run"], "Missing argument 'CONFIG|IMAGES'"),
        (["runs"], "Example: raycap runs results"),
        (["run", str(ROOT / "raycap" / "configs")], "configs is a folder; give the path of a YAML file"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err
    assert main(["https://me:secret-word@host"]) == 2
    assert "No such command 'https://host'" in capsys.readouterr().err


def complete(*words: str) -> list[str]:
    """What bash offers after these words, of which the last one is incomplete. Neither torch nor Ray may be loaded."""
    code = (
        "import sys\nfrom raycap.jobs.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "loaded = {'torch', 'ray'} & set(sys.modules)\nassert not loaded, loaded"
    )
    shell = {"_RAYCAP_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words)), "COMP_WORDS": " ".join(["x", *words])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | shell
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_shell_completes_commands() -> None:
    assert complete("sc") == ["score"] and complete("--ver") == ["--verbose", "--version"]
    assert complete("bench", "") == list(BENCHMARKS)


def test_a_shell_completes_options() -> None:
    assert set(complete("evaluate", "--")) > {"--help", "--quiet", "--verbose", "--split"}
    assert "--help" in complete("bench", "gpu", "--")


def test_no_text_goes_around_the_filter() -> None:
    """Errors of threads, handlers of other programs, and handlers that fail."""
    code = (
        "import logging, sys, threading; from raycap.jobs.cli import main\n"
        "text = 'http://me:secret-word@host is odd'\n"
        "def fail(*_): raise RuntimeError(text)\n"
        "main(['--help']); logging.getLogger().addHandler(logging.StreamHandler())\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "logging.getLogger('raycap').addHandler(logging.FileHandler('/dev/full'))\n"
        "logging.getLogger('raycap').warning(text)\n"
        "fail()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "secret-word" not in done.stdout + done.stderr, done.stderr
    assert done.stderr.count("http://host is odd") == 2 and done.stdout.count("http://host is odd") == 1


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ending_with(outcome: BaseException | int | None) -> int:
        def command() -> object:
            """A command."""
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(sys.modules[__name__], "command", command, raising=False)
        monkeypatch.setitem(COMMANDS, "try", Entry(f"{__name__}:command", "A command."))
        return main(["try"])

    assert [ending_with(outcome) for outcome in (None, 0, 1, 3)] == [0, 0, 1, 3]
    for error, code, sentence in (
        (UserError("key a: found 1"), 2, "raycap: key a: found 1\n"),
        (JobFailedError("stage x:\n  diverged"), 1, "raycap: stage x: diverged\n"),
        (FileNotFoundError(2, "No such file", "a.json"), 1, "raycap: [Errno 2] No such file: 'a.json'\n"),
        (KeyboardInterrupt(), 130, "raycap: stopped; run the same command again to continue\n"),
    ):
        capsys.readouterr()
        assert ending_with(error) == code
        assert capsys.readouterr().err == sentence
    capsys.readouterr()
    for cause, code in ((JobFailedError("x is damaged"), 1), (UserError("key a: found 1"), 2)):
        of_task = RayTaskError("task", "\x1b[36mTraceback ...", cause).as_instanceof_cause()
        for error in (of_task, RayTaskError("outer task", "\x1b[36mTraceback ...", of_task).as_instanceof_cause()):
            assert ending_with(error) == code
            assert capsys.readouterr().err == f"raycap: {cause}\n", "without the traceback that Ray adds"
    with pytest.raises(RayTaskError):
        ending_with(RayTaskError("task", "Traceback ...", ZeroDivisionError("a bug")).as_instanceof_cause())
    with pytest.raises(ZeroDivisionError):
        ending_with(ZeroDivisionError("a bug keeps its traceback"))


@pytest.mark.parametrize("error", [UserError, JobFailedError])
def test_a_name_in_an_error_cannot_control_the_terminal(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error("stage \x1b[2J\nraycap: finished")

    monkeypatch.setattr(Entry, "load", fail)
    assert main(["score"]) in (1, 2)
    assert capsys.readouterr().err == "raycap: stage \\x1b[2J raycap: finished\n"


def test_log_levels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        """A command."""
        for level, text in ((logging.DEBUG, "D"), (logging.INFO, "I"), (logging.WARNING, "W")):
            logging.getLogger("raycap.jobs.example").log(level, text)

    monkeypatch.setattr(sys.modules[__name__], "command", command, raising=False)
    monkeypatch.setitem(COMMANDS, "try", Entry(f"{__name__}:command", "A command."))
    for words, shown in (
        (["try"], "IW"),
        (["--quiet", "try"], "W"),
        (["try", "-v"], "DIW"),
        (["-q", "try", "-v"], "DIW"),
    ):
        assert main(words) == 0
        assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == list(shown)
