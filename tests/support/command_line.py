"""The command line without running anything."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from typer.core import TyperGroup

from raycap.jobs.cli import root_command


def parse(words: list[str]) -> Any:
    """The context of `raycap WORDS`, whose `params` has the command's values. Raises for options that do not fit.

    Configurations that the words name by a path need not exist, because a reader of the documents writes them.
    """
    group: Any = root_command()
    context = group.make_context("raycap", [words[0]], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words)
    while isinstance(command, TyperGroup):
        name, command, rest = command.resolve_command(command.make_context(name, rest[:1], parent=context), rest)
    if command is None:
        raise ValueError(f"raycap {' '.join(words)} names no command")
    with patch("raycap.pipeline.config.shipped.is_file", lambda path: path.suffix == ".yaml"):
        return command.make_context(name, rest, parent=context)
