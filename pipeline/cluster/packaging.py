"""The code as one archive: what a job on a cluster needs of this checkout, and nothing else.

What `.gitignore` and `.rayignore` name stays here, and so do data, results, environments, caches and files that hold
secrets by their name. The archive of the same files is the same bytes, so that a cluster that has it is not sent it
again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from pipeline.errors import UserError

LIMIT_BYTES = 100 * 2**20  # what Ray's jobs server takes (ray 2.60, DASHBOARD_CLIENT_MAX_SIZE)
LARGEST = 5
IGNORE_FILES = (".gitignore", ".rayignore")
ALWAYS_LEFT_OUT = (
    *(".git", ".hg", ".venv", "venv/", "__pycache__", "*.py[co]", "*.egg-info", "node_modules", ".ipynb_checkpoints"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".cache", ".DS_Store"),
    *("/data/", "/results/", "/mlruns/", "/build/", "/dist/", "mlflow.db"),
    *(".env", ".env.*", "*.pem", "*.key", ".netrc", ".pgpass", ".aws/", ".ssh/", "auth_token"),
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip can hold
_CHUNK = 2**20


@dataclass(frozen=True)
class Package:
    """An archive that was written: `size` of it, `content` of what is in it (bytes), and the largest files."""

    path: Path
    files: int
    size: int
    content: int
    largest: tuple[tuple[str, int], ...]
    sha1: str

    @property
    def name(self) -> str:
        """What Ray's package store calls it: the same files have the same name."""
        return f"_ray_pkg_{self.sha1}.zip"

    def describe(self) -> str:
        return (
            f"{self.files} files, {mebibytes(self.content)}, {mebibytes(self.size)} packed; "
            f"the largest: {_list(self.largest)}"
        )


def find_files(root: Path, left_out: Iterable[Path] = ()) -> dict[str, Path]:
    """Files below `root` that belong to a package, by their path in it; `left_out` are folders or files to skip.

    Links are followed only to files inside `root`: a package holds nothing from elsewhere.
    """
    root = root.resolve()
    skipped = {path.resolve() for path in left_out}
    found: dict[str, Path] = {}
    _walk(root, root, [(root, GitIgnoreSpec.from_lines(ALWAYS_LEFT_OUT))], skipped, found)
    return dict(sorted(found.items()))


def _walk(
    folder: Path, root: Path, specs: list[tuple[Path, GitIgnoreSpec]], skipped: set[Path], found: dict[str, Path]
) -> None:
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
                _walk(path, root, specs, skipped, found)
            elif entry.is_file() and path.resolve().is_relative_to(root):
                found[path.relative_to(root).as_posix()] = path


def _is_ignored(path: Path, is_folder: bool, specs: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    return any(spec.match_file(path.relative_to(base).as_posix() + ("/" if is_folder else "")) for base, spec in specs)


def pack(files: Mapping[str, Path | bytes], target: Path, limit: int = LIMIT_BYTES) -> Package:
    """Writes the archive `target`; values are files or contents.

    Raises UserError, with the largest files, as soon as the archive is above `limit` bytes; nothing is left then.
    """
    sizes = {name: len(value) if isinstance(value, bytes) else value.stat().st_size for name, value in files.items()}
    largest = tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:LARGEST])
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
                f"{mebibytes(limit)} that Ray's jobs server takes; name in .rayignore what a job does not need; "
                f"the largest files: {_list(largest)}"
            )
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha1").hexdigest()
    return Package(target, len(files), size, sum(sizes.values()), largest, digest)


def _add(archive: zipfile.ZipFile, name: str, value: Path | bytes) -> None:
    """One file, without what changes from one packing to the next."""
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


def _list(largest: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} ({mebibytes(size)})" for name, size in largest)
