"""The versions of raycap and its main packages, and the commit, as `raycap --version` prints them.

In a checkout the commit comes from git, and in a package for a cluster from the file COMMIT. This module imports only
the standard library, so that the command takes milliseconds.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

COMMIT_FILE = "COMMIT"  # in packages for clusters and container images, because these have no .git


def package_folder() -> Path:
    """The folder of the package raycap, which contains models, pipeline, jobs and configs."""
    return Path(__file__).parent.parent


def commit() -> str:
    """The commit's short hash, with `-dirty` if files differ from the commit. "unknown" if no commit is found."""
    package = package_folder()
    if (package.parent / ".git").exists():  # true in a checkout only
        command = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    path = package / COMMIT_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def version_lines() -> list[str]:
    """The lines that `raycap --version` prints."""
    packages = [f"{name:<8}{version_of(name)}" for name in ("torch", "ray")]
    return [f"raycap  {version_of('raycap')}", f"commit  {commit()}", f"python  {platform.python_version()}", *packages]


def version_of(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
