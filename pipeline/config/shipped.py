"""The shipped configurations, which arguments name without folder and suffix: `demo` is configs/demo.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path

from raycap.pipeline.errors import UserError
from raycap.pipeline.untrusted.names import MAX_QUOTED, shown
from raycap.pipeline.version import package_folder


def shipped_names(folder: str = "") -> list[str]:
    """The names of the shipped configurations, or of those in a folder below configs/."""
    return sorted(path.stem for path in _folder(folder).glob("*.yaml"))


def shipped_file(path: Path, folder: str = "") -> Path | None:
    """The shipped configuration that an argument names. None if it is no such name, or a file or folder here."""
    is_name = str(path) in shipped_names(folder) and not path.exists()
    return _folder(folder) / f"{path}.yaml" if is_name else None


def named_config(path: Path | None) -> Path | None:
    """The file of a configuration that an argument names, which may be a shipped one. None without an argument.

    Raises UserError with similar names for a name that is neither a file nor that of a shipped configuration.
    """
    return None if path is None else _named(path, "")


def named_data(path: Path | None) -> Path | None:
    """As `named_config`, for the data files in configs/data/."""
    return None if path is None else _named(path, "data")


def _named(path: Path, folder: str) -> Path:
    file = shipped_file(path, folder)
    if file is not None:
        return file
    if path.name != str(path) or path.suffix or path.exists():
        return path  # the path of a file, which its reader examines
    similar = difflib.get_close_matches(str(path)[:MAX_QUOTED], shipped_names(folder), n=3)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`raycap config --list` prints the names"
    raise UserError(f"{shown(path)} is neither a file here nor the name of a shipped configuration; {hint}")


def _folder(folder: str) -> Path:
    return package_folder() / "configs" / folder
