"""The files that a job on a cluster gets, as a folder that Ray packs and sends (`working_dir`).

They are what a wheel of raycap contains, below raycap/. In a checkout of git these are only files that git tracks, so
that pictures, results and notes beside the code stay here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.version import checkout_files, is_git_checkout

LIMIT_BYTES = 100 * 2**20  # the largest request of Ray's jobs server (ray 2.60, DASHBOARD_CLIENT_MAX_SIZE)
NUM_NAMED_FILES = 5  # messages name this many files
PACKAGE = "raycap"
SUFFIXES = (".py", ".yaml", ".html", ".jinja", ".typed")  # of the files in a wheel
# A private key in a file of any name: in lines, or in a text of JSON
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\n)+[\w+/=:,\s-]{20}")
MAX_KEY_BYTES = 2**16  # larger files are not searched for a private key
logger = logging.getLogger(__name__)


def package_sources(package: Path) -> dict[str, Path]:
    """The files of the package raycap in the folder `package`, by their path in the job's folder.

    In a checkout of git they are those that git tracks. Logs which modules git does not track, because the job lacks
    them. Raises UserError if git cannot list the files, and for a package that cannot be run.
    """
    if is_git_checkout(package):
        sources = _tracked_sources(package.parent)
    else:
        sources = {f"{PACKAGE}/{path.relative_to(package).as_posix()}": path for path in package.rglob("*")}
    found = {name: path for name, path in sources.items() if path.suffix in SUFFIXES and path.is_file()}
    if f"{PACKAGE}/__main__.py" not in found:
        raise UserError(f"{package} has no file __main__.py to send; install raycap again, or submit from a checkout")
    return found


def _tracked_sources(checkout: Path) -> dict[str, Path]:
    """The files of the package in a checkout that git tracks, by their path in the job's folder."""
    try:
        tracked, untracked = checkout_files(checkout, PACKAGE)
    except OSError as error:
        raise UserError(f"git cannot list the files of {checkout}, which decides what is sent: {error}") from error
    if modules := [name for name in untracked if name.endswith(".py")]:
        more = f" and {len(modules) - NUM_NAMED_FILES} more" if len(modules) > NUM_NAMED_FILES else ""
        names = ", ".join(map(printable, modules[:NUM_NAMED_FILES]))
        logger.warning(f"git does not track {names}{more}, which the job lacks; git add what it needs")
    return {name: checkout / name for name in tracked if not (checkout / name).is_symlink()}


def refuse_private_keys(files: Mapping[str, Path | bytes]) -> None:
    """Raises UserError for a file with a private key."""
    for path in files.values():
        if isinstance(path, Path) and path.stat().st_size < MAX_KEY_BYTES and _PRIVATE_KEY.search(path.read_bytes()):
            raise UserError(f"{path} contains a private key, which others could read on the cluster; remove it")


def stage(files: Mapping[str, Path | bytes], folder: Path, limit: int = LIMIT_BYTES) -> str:
    """Writes files or contents into a folder, which Ray packs, by their path in it. Returns a line about its content.

    Raises UserError naming the largest files if they have more than `limit` bytes.
    """
    sizes = {name: len(value) if isinstance(value, bytes) else value.stat().st_size for name, value in files.items()}
    by_size = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in by_size[:NUM_NAMED_FILES])
    summary = f"{len(files)} files, {mebibytes(sum(sizes.values()))}"
    if sum(sizes.values()) > limit:
        raise UserError(
            f"the code to send ({summary}) has more than the {mebibytes(limit)} that Ray's jobs server accepts; put "
            "large files that keys name where all nodes find them, and give absolute paths; the largest files: "
            f"{largest}"
        )
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value if isinstance(value, bytes) else value.read_bytes())
    return f"{summary}; the largest: {largest}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.0f} KiB"
