"""The code of this checkout as one archive for a job on a cluster.

The archive leaves out what `.gitignore` and `.rayignore` name, and also data, results, environments, caches, and files
whose names suggest secrets. Equal files give an archive of equal bytes, so that a cluster receives it only once. Ray's
own packaging (`working_dir` of a runtime environment) has no such list, and its parts are not public.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from pipeline.errors import UserError

LIMIT_BYTES = 100 * 2**20  # the largest request of Ray's jobs server (ray 2.60, DASHBOARD_CLIENT_MAX_SIZE)
NUM_NAMED_FILES = 5  # messages name this many of the largest files
IGNORE_FILES = (".gitignore", ".rayignore")
ALWAYS_LEFT_OUT = (
    *(".git", ".hg", ".venv", "venv/", "__pycache__", "*.py[co]", "*.egg-info", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".cache", ".DS_Store"),
    *("/data/", "/results/", "/mlruns/", "/build/", "/dist/", "mlflow.db"),
    *(".env", ".env.*", "*.pem", "*.key", ".netrc", ".pgpass", ".aws/", ".ssh/", "auth_token"),
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip file
_CHUNK = 2**20


@dataclass(frozen=True)
class Package:
    """An archive: its `size` and that of its `content` unpacked, in bytes, and its largest files."""

    path: Path
    files: int
    size: int
    content: int
    largest: tuple[tuple[str, int], ...]
    sha1: str

    @property
    def name(self) -> str:
        """Its name in Ray's package store; equal files have equal names."""
        return f"_ray_pkg_{self.sha1}.zip"

    def describe(self) -> str:
        return (
            f"{self.files} files, {mebibytes(self.content)}, {mebibytes(self.size)} packed; "
            f"the largest: {_listed(self.largest)}"
        )


def find_files(root: Path, left_out: Iterable[Path] = ()) -> dict[str, Path]:
    """Files below `root` that belong into a package, by their path in it, without the folders and files `left_out`.

    Links are followed only to files inside `root`, so that a package holds nothing from outside.
    """
    root = root.resolve()
    skipped = {path.resolve() for path in left_out}
    paths = _walk(root, root, [(root, GitIgnoreSpec.from_lines(ALWAYS_LEFT_OUT))], skipped)
    return {path.relative_to(root).as_posix(): path for path in sorted(paths)}


def _walk(folder: Path, root: Path, specs: list[tuple[Path, GitIgnoreSpec]], skipped: set[Path]) -> Iterator[Path]:
    specs = specs + [
        (folder, GitIgnoreSpec.from_lines((folder / name).read_text(encoding="utf-8").splitlines()))
        for name in IGNORE_FILES
        if (folder / name).is_file()
    ]
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if path.resolve() in skipped or _is_ignored(path, is_folder, specs):
                continue
            if is_folder:
                yield from _walk(path, root, specs, skipped)
            elif entry.is_file() and path.resolve().is_relative_to(root):
                yield path


def _is_ignored(path: Path, is_folder: bool, specs: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    return any(spec.match_file(path.relative_to(base).as_posix() + ("/" if is_folder else "")) for base, spec in specs)


def pack(files: Mapping[str, Path | bytes], target: Path, limit: int = LIMIT_BYTES) -> Package:
    """Writes the archive `target` of files or contents by their path in it.

    Raises UserError naming the largest files as soon as the archive exceeds `limit` bytes, and removes it.
    """
    sizes = {name: len(value) if isinstance(value, bytes) else value.stat().st_size for name, value in files.items()}
    largest = tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:NUM_NAMED_FILES])
    try:
        with target.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in sorted(files):
                    _add(archive, name, files[name])
                    if file.tell() > limit:
                        break
            size = file.tell()
        if size > limit:
            raise UserError(
                f"the code to send ({len(files)} files, {mebibytes(sum(sizes.values()))}) packs to more than the "
                f"{mebibytes(limit)} that Ray's jobs server accepts; list in .rayignore what a job does not need; "
                f"the largest files: {_listed(largest)}"
            )
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha1").hexdigest()
    return Package(target, len(files), size, sum(sizes.values()), largest, digest)


def _add(archive: zipfile.ZipFile, name: str, value: Path | bytes) -> None:
    """Adds one file, without its times, which would change the archive's digest."""
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    executable = isinstance(value, Path) and os.access(value, os.X_OK)
    info.external_attr = (0o755 if executable else 0o644) << 16
    with archive.open(info, "w") as into:
        if isinstance(value, bytes):
            into.write(value)
            return
        with value.open("rb") as file:
            shutil.copyfileobj(file, into, _CHUNK)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.0f} KiB"


def _listed(largest: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({mebibytes(size)})" for name, size in largest)
