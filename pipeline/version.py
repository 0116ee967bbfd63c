"""Which commit this code is: what git says of the checkout, or what was written beside the code when it was packed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMMIT_FILE = "COMMIT"  # in a package for a cluster, which has no .git


def project_root() -> Path:
    """The folder that holds models/, pipeline/ and jobs/."""
    return Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit's short hash, with `-dirty` when files differ from it; `unknown` without git and without the file."""
    here = project_root()
    git = shutil.which("git")
    if git is not None and (here / ".git").exists():
        command = [git, "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    written = here / COMMIT_FILE
    return written.read_text(encoding="utf-8").strip() if written.is_file() else "unknown"
