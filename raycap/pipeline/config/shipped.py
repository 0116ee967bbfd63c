"""Finds shipped configurations by their names in arguments: `demo` means raycap/configs/demo.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import MAX_QUOTED, shown
from raycap.pipeline.storage.untrusted.documents import is_file, is_folder
from raycap.pipeline.version import package_folder


def shipped_names(folder: str = "") -> list[str]:
    """The sorted names of the shipped configurations in raycap/configs/ or in the folder `folder` below it."""
    return sorted(path.stem for path in _folder(folder).glob("*.yaml"))


def named_place(path: Path) -> Path | None:
    """The path itself if it exists, otherwise the shipped configuration of this name. None if there is neither."""
    return path if is_file(path) or is_folder(path) else _shipped_file(path, "")


def named_config(path: Path | None) -> Path | None:
    """The file of the configuration or search that an argument names by path or by the name of a shipped one.

    path: the argument. If it is None, the result is None. Raises UserError if there is neither a file of this path nor
    a shipped configuration of this name.
    """
    return None if path is None else _named(path, "")


def named_data(path: Path | None) -> Path | None:
    """The data file that an argument names. Like `named_config`, but with the shipped files in raycap/configs/data/."""
    return None if path is None else _named(path, "data")


def referenced_file(folder: Path, name: str) -> Path:
    """The file that a configuration in `folder` names under `extends` or `base`. The returned file need not exist.

    name: a path relative to `folder`. If there is no such file, the name means a shipped configuration, with or without
    the suffix .yaml.
    """
    path = folder / name
    if not is_file(path):
        shipped = _folder("")
        for file in (shipped / name, shipped / f"{name}.yaml"):
            if is_shipped(file):
                return file
    return path


def is_shipped(path: Path) -> bool:
    """True if a path is a file in raycap/configs/, also through links."""
    return is_file(path) and path.resolve().is_relative_to(_folder("").resolve())


def _named(path: Path, folder: str) -> Path:
    """The file of a path, or the shipped file of this name in `folder` below raycap/configs/. Raises UserError."""
    file = path if is_file(path) else _shipped_file(path, folder)
    if file is not None:
        return file
    problem = "is a folder" if is_folder(path) else "does not exist"
    similar = difflib.get_close_matches(path.stem[:MAX_QUOTED], shipped_names(folder), n=3)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`raycap config --list` prints the names"
    kind = "data file" if folder else "configuration"
    raise UserError(
        f"{kind} {shown(path)} {problem}; give the path of a YAML file, or the name of a shipped one: {hint}"
    )


def _shipped_file(path: Path, folder: str) -> Path | None:
    """The shipped file of this name in `folder`. None if there is none."""
    return _folder(folder) / f"{path}.yaml" if str(path) in shipped_names(folder) else None


def _folder(folder: str) -> Path:
    return package_folder() / "configs" / folder
