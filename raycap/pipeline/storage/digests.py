"""SHA-256 digests by which damaged files are found.

    digests.json   {"format": 1, "files": {name: digest}}   of the files of its folder

A file is read as a whole when it is first used on a machine, at 1 to 2 GB/s on one core. A mark in the folder `checked`
of the cache then stands for a whole file with this name, size and time. Marks may be deleted at any time. Files without
a mark are read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from raycap.models.config import Values
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.storage.atomic import decode_json, write_bytes, write_json
from raycap.pipeline.storage.path import cache_folder

DIGESTS = "digests.json"
FORMAT = 1
MAX_HOLES = 10  # a file that takes less than a tenth of its size on the disk is sparse, and not only compressed


def write_digests(folder: Path, names: Iterable[str] = ()) -> None:
    """Writes the digests of these files of a folder, by default of all its visible files."""
    path = folder / DIGESTS
    names = names or [file.name for file in folder.glob("[!.]*") if file != path]
    write_json(path, {"format": FORMAT, "files": {name: file_digest(folder / name) for name in sorted(names)}})


def digests_in(data: bytes, name: str) -> Values:
    """{file: SHA-256} in the content of the `digests.json` with this name. Raises DamagedError."""
    content = decode_json(data, name)
    has_format = isinstance(content, dict) and content.get("format") == FORMAT
    if not has_format or not isinstance(content.get("files"), dict):
        raise DamagedError(f"{name} is damaged: it must have format {FORMAT} and the digests of files")
    return dict(content["files"])


def has_digest(path: Path, sha256: str) -> bool:
    """Whether a local file has this digest. The file is read only if this machine has not found it whole before."""
    status = path.stat()
    state = f"{path.absolute()} {status.st_ino} {status.st_size} {status.st_mtime_ns} {sha256}"
    name = hashlib.sha256(state.encode()).hexdigest()
    mark = cache_folder() / "checked" / name[:2] / name
    if not mark.exists():
        try:
            if file_digest(path) != sha256:
                return False
        except UserError:  # the file is sparse
            return False
        with suppress(OSError):  # if the cache cannot be written, every process reads the file
            write_bytes(mark, b"", durable=False)
    return True


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def file_digest(path: Path) -> str:
    """The SHA-256 of a local file. Raises UserError for a sparse file that is larger than the memory.

    No file of raycap is sparse. A sparse file of a tebibyte takes no space, and reading it would take hours.
    """
    status = path.stat()
    allocated = 512 * status.st_blocks
    if status.st_size > max(memory_bytes(), MAX_HOLES * allocated):
        raise UserError(
            f"{path} is damaged: it has {status.st_size} bytes, of which {allocated} are on the disk; restore it from "
            "a copy"
        )
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
