"""The commit of this code: from git in a checkout, from a file in a package for a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMMIT_FILE = "COMMIT"  # written into packages, which have no .git


def project_root() -> Path:
    """The folder with models/, pipeline/, jobs/ and raycap/."""
    return Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit's short hash, with `-dirty` when files differ from it; `unknown` without git and the file."""
    root = project_root()
    git = shutil.which("git")
    if git is not None and (root / ".git").exists():
        command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    path = root / COMMIT_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"
