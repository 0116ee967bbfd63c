"""The files that belong to this checkout, whatever else lies in its folder, and the wheel of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("raycap", "raycap_onnx")  # folders from which a wheel is built


def own(paths: Iterable[Path]) -> list[Path]:
    """The files and links among `paths` that git tracks, sorted. Without git, all of them but bytecode."""
    tracked = None
    if (ROOT / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
            tracked = {ROOT / name for name in names.stdout.split("\0")}
    files = (path for path in set(paths) if path.is_file() or path.is_symlink())
    return sorted(path for path in files if (path.suffix != ".pyc" if tracked is None else path in tracked))


def copy_sources(target: Path) -> Path:
    """Copies what a wheel is built from. Returns `target`."""
    below = (path for name in SOURCES for path in (ROOT / name).rglob("*"))
    for path in own([*below, *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]):
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy, follow_symlinks=False)
    return target


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel of `source` in `folder`, without a network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
