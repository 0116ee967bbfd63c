"""The package raycap as one archive for a job on a cluster.

The archive holds what a wheel holds, below raycap/. In a checkout of git these are only files that
git tracks, so that pictures, results and notes beside the code stay here. Equal files give an archive of equal bytes,
so that a cluster receives it only once. Ray's own packaging (`working_dir` of a runtime environment) sends whole
folders, and its parts are not public.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import zipfile
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
    """The files of the package raycap in the folder `package`, by their path in an archive.

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
    """The files of the package in a checkout that git tracks, by their path in an archive."""
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


def pack(files: Mapping[str, Path | bytes], target: Path, limit: int = LIMIT_BYTES) -> tuple[str, str]:
    """Writes the archive `target` of files or contents by their path in it.

    Returns its name in Ray's package store, where equal files have equal names, and a line about its content. Raises
    UserError naming the largest files as soon as the archive exceeds `limit` bytes.
    """
    sizes = {name: len(value) if isinstance(value, bytes) else value.stat().st_size for name, value in files.items()}
    by_size = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in by_size[:NUM_NAMED_FILES])
    num_files, content = f"{len(files)} files", mebibytes(sum(sizes.values()))
    with target.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(files):
                _add(archive, name, files[name])
                if file.tell() > limit:
                    break
        packed_size = file.tell()
    if packed_size > limit:
        raise UserError(
            f"the code to send ({num_files}, {content}) packs to more than the {mebibytes(limit)} that Ray's jobs "
            f"server accepts; put large files that keys name where all nodes find them, and give absolute paths; the "
            f"largest files: {largest}"
        )
    digest = hashlib.sha1(target.read_bytes()).hexdigest()
    summary = f"{num_files}, {content}, {mebibytes(packed_size)} packed; the largest: {largest}"
    return f"_ray_pkg_{digest}.zip", summary


def _add(archive: zipfile.ZipFile, name: str, value: Path | bytes) -> None:
    """Adds one file. It gets the fixed time of ZipInfo, because its own would change the archive's digest."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    is_executable = isinstance(value, Path) and os.access(value, os.X_OK)
    info.external_attr = (0o755 if is_executable else 0o644) << 16  # the upper two bytes are the Unix mode
    with (
        archive.open(info, "w") as target,
        value.open("rb") if isinstance(value, Path) else io.BytesIO(value) as source,
    ):
        shutil.copyfileobj(source, target)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.0f} KiB"
