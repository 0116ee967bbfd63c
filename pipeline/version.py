"""What runs: the versions of raycap and of what it stands on, the commit, and the device.

The commit is that of git in a checkout, and of a file in a package for a cluster. No other package is imported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")  # where NVIDIA's driver lists the GPUs that this process may use
COMMIT_FILE = "COMMIT"  # written into packages, which have no .git


def package_folder() -> Path:
    """The folder of the package raycap, which contains models, pipeline, jobs and configs.

    In a checkout these are links to the folders beside raycap/.
    """
    return Path(__file__).parent.parent


def commit() -> str:
    """The commit's short hash, with `-dirty` when files differ from it; `unknown` without git and the file."""
    root = package_folder()
    described = _git(root.parent, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    if described is not None:
        return described.strip() or "unknown"
    path = root / COMMIT_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def checkout_files(checkout: Path, folders: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The files below `folders` of a checkout that git tracks, and those that it neither tracks nor ignores.

    They are paths relative to the checkout; tracked files may have been deleted. None where git does not know them.
    """
    tracked = _git(checkout, "ls-files", "-z", "--", *folders)
    if not tracked:
        return None
    others = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard", "--", *folders)
    return tracked.split("\0")[:-1], (others or "").split("\0")[:-1]


def _git(checkout: Path, *arguments: str) -> str | None:
    """What git prints, empty if it fails. None without git, or for a folder that is no root of a checkout."""
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None
    done = subprocess.run(
        [git, "-C", str(checkout), *arguments], capture_output=True, encoding="utf-8", errors="surrogateescape"
    )
    return done.stdout if done.returncode == 0 else ""


def version_lines() -> list[str]:
    """The lines of `raycap --version`. They take milliseconds, because torch and Ray are asked for nothing."""
    packages = [f"{name:<8}{_version_of(name)}" for name in ("torch", "ray")]
    head = f"raycap  {_version_of('raycap')}"
    return [head, f"commit  {commit()}", f"python  {platform.python_version()}", *packages, f"device  {_device()}"]


def _version_of(package: str) -> str:
    """The version of an installed package, or that it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    """The names of the GPUs that the driver lists, each with its number; CPU without any."""
    models = []
    for file in sorted(GPUS.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    counts = {model: models.count(model) for model in models}
    return ", ".join(f"{count} x {model}" for model, count in counts.items()) or "CPU"
