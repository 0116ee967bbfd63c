"""`raycap`: the command line.

Exit codes: 0 for success, 1 for a failure, 2 for a mistake of the caller, 130 after Ctrl-C, and 143 after SIGTERM.

Each command is a function in the module that does its work. This file contains only the commands' names and summaries,
so that `raycap --help` imports none of these modules.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from raycap.models.config import Values
from raycap.pipeline.errors import JobFailedError, UserError, cause_of
from raycap.pipeline.runtime.log import configure_logging
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.runtime.secrets import forget_all, without_secrets
from raycap.pipeline.runtime.stopping import STOPPED, exit_code, handle_signals
from raycap.pipeline.version import version_lines

COMPLETION = "_RAYCAP_COMPLETE"  # a shell that completes a command line sets this variable


@dataclass(frozen=True)
class Entry:
    """One command of the tables `COMMANDS` and `BENCHMARKS`.

    target: the function, written as module:function. summary: the first sentence of its docstring. can_submit: True if
    `raycap submit` accepts the command. passes_options_on: True if the command accepts unknown options and passes them
    to another command.
    """

    target: str
    summary: str
    can_submit: bool = False
    passes_options_on: bool = False

    def load(self, name: str) -> TyperCommand:
        """Imports the function and turns it into a command."""
        module, _, function = self.target.partition(":")
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if self.passes_options_on else None
        command = _as_command(getattr(import_module(module), function), name, settings)
        if not self.passes_options_on:  # a command that passes options on must also pass on --verbose
            command.params.extend(_as_command(_log_levels, "options").params)
        return command


COMMANDS = {
    "init": Entry("raycap.jobs.init:init", "Look at captioned images and write a configuration for them."),
    "run": Entry("raycap.jobs.run:command", "Train, evaluate and register a model.", can_submit=True),
    "check": Entry("raycap.jobs.check:check", "Check whether a data set is fit to train on.", can_submit=True),
    "config": Entry("raycap.jobs.config:config", "Print a configuration as it will be used."),
    "extract": Entry("raycap.jobs.extract:extract", "Compute the features of a data set.", can_submit=True),
    "score": Entry("raycap.jobs.score:score", "Score a COCO result file."),
    "evaluate": Entry("raycap.jobs.evaluate:evaluate", "Caption splits of a data set and score them.", can_submit=True),
    "compare": Entry("raycap.jobs.compare:compare_models", "Score several models on a split, side by side."),
    "tune": Entry("raycap.jobs.tune.command:command", "Search over configuration keys.", can_submit=True),
    "caption": Entry("raycap.jobs.caption:caption", "Caption image files.", can_submit=True),
    "serve": Entry("raycap.jobs.serve.command:command", "Serve captions over HTTP."),
    "retrain": Entry("raycap.jobs.retrain:retrain", "Train on new data and keep the better model.", can_submit=True),
    "import": Entry("raycap.jobs.import_:import_checkpoint", "Turn an upstream checkpoint into a model bundle."),
    "export": Entry("raycap.jobs.export:export", "Write a captioner as ONNX graphs that run without raycap."),
    "soup": Entry("raycap.jobs.soup:soup", "Join models by the weighted sum of their weights."),
    "reproduce": Entry("raycap.jobs.reproduce:reproduce", "Compare published checkpoints with their papers' scores."),
    "runs": Entry("raycap.jobs.runs:runs", "List what a storage contains, and remove what is not needed."),
    "sync": Entry("raycap.jobs.sync:sync", "Send the tracker what it missed while it was down.", can_submit=True),
    "submit": Entry("raycap.jobs.submit:command", "Run a command as a job on a Ray cluster.", passes_options_on=True),
    "doctor": Entry("raycap.jobs.doctor:doctor", "Check what this machine or a cluster can run.", can_submit=True),
}
BENCHMARKS = {
    "gpu": Entry("raycap.jobs.bench_gpu:bench_gpu", "Speed of training, extraction and decoding on one GPU."),
}


class LazyGroup(TyperGroup):
    """A group of commands. The module of a command is imported only when the command is used.

    table: the commands by name. Their summaries form the group's help.
    """

    def __init__(self, table: Mapping[str, Entry], **settings: Any) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode=None, **settings)
        self.table = table
        self.params.extend(_as_command(_log_levels, "options").params)
        for name, entry in table.items():
            self.add_command(TyperCommand(name, short_help=entry.summary, help=entry.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Imports the named command, in place of the placeholder without options that `__init__` has added."""
        name, command, rest = super().resolve_command(ctx, args)
        # a shell that completes does not wait for torch
        is_too_slow = self.name == "bench" and COMPLETION in os.environ
        if name is not None and name in self.table and not is_too_slow:
            command = self.table[name].load(name)
        return name, command, rest


def root_command() -> LazyGroup:
    """The command `raycap` with all its subcommands."""
    root = LazyGroup(COMMANDS, name="raycap", help="Train, tune and evaluate image-captioning models on a Ray cluster.")
    root.params.extend(_as_command(_version, "options", completes=True).params)
    root.add_command(LazyGroup(BENCHMARKS, name="bench", help="Measure this machine."))
    return root


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. argv: the arguments. If it is None, sys.argv gives them."""
    handle_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Each line is flushed, so that a log file shows it at once. Names that are not UTF-8 are escaped, because
            # printing them would raise an error.
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    configure_logging()
    forget_all()
    sys.excepthook = _print_traceback
    if threading.excepthook is threading.__excepthook__:  # a hook that a caller such as pytest has set is kept
        threading.excepthook = _print_error_of_thread
    root = root_command()
    if COMPLETION in os.environ:
        root.main([], prog_name="raycap")  # answers the shell and ends the process
    try:
        with root.make_context("raycap", list(sys.argv[1:] if argv is None else argv)) as context:
            result = root.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except TyperException as error:  # the command line cannot be parsed
        text = io.StringIO()
        error.show(text)  # type: ignore[attr-defined]
        _print_text(text.getvalue() + _example_of(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(STOPPED, file=sys.stderr)
        return exit_code()
    except BrokenPipeError:  # `head` has closed the pipe, so Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        cause = cause_of(error)
        if not isinstance(cause, UserError | JobFailedError | OSError):
            raise
        _print_text(f"raycap: {' '.join(str(cause).split())}")
        return 2 if isinstance(cause, UserError) else 1
    return result if isinstance(result, int) else 0


def _example_of(error: TyperException) -> str:
    """The line "Example: ..." from the help of the command that was called wrongly. "" if the help has none."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    example = (getattr(command, "help", None) or "").partition("Example: ")[2]
    return f"Example: {example.strip()}" if example else ""


def _as_command(function: Any, name: str, settings: Values | None = None, *, completes: bool = False) -> Any:
    """Turns a function into a Typer command.

    settings: the command's context settings. If it is None, the defaults apply. completes: True adds Typer's options
    --install-completion and --show-completion.
    """
    app = typer.Typer(add_completion=completes, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, context_settings=settings)(function)
    return get_command(app)


def _set_log_level(option: typer.CallbackParam, is_set: bool) -> None:
    """Sets what the terminal shows: with --quiet only warnings, with --verbose also details."""
    if is_set:
        configure_logging(logging.WARNING if option.name == "quiet" else logging.DEBUG)


def _log_levels(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Log warnings only.", callback=_set_log_level, expose_value=False)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log details, too.", callback=_set_log_level, expose_value=False)
    ] = False,
) -> None:
    """Declares the options of every command and group. This function is never called, only the options' callbacks."""


def _print_version(is_set: bool) -> None:
    if is_set:
        print("\n".join(version_lines()))
        raise typer.Exit


def _version(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print versions and commit.", callback=_print_version, expose_value=False),
    ] = False,
) -> None:
    """Declares the option --version of `raycap`. This function is never called, only the option's callback."""


def _print_error_of_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is not SystemExit:  # which only ends the thread, so Python's own hook ignores it, too
        _print_traceback(found.exc_type, found.exc_value, found.exc_traceback)


def _print_traceback(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Prints an unexpected error with its traceback, as Python does, but without secrets and control characters."""
    _print_text("".join(traceback.format_exception(kind, error, trace)))


def _print_text(text: str) -> None:
    """Prints lines on standard error, without secrets and control characters."""
    print("\n".join(map(printable, without_secrets(text).rstrip("\n").split("\n"))), file=sys.stderr)
