"""Finds damaged files by their SHA-256 digests.

    digests.json   {"format": 1, "files": {name: digest}}   of the files in the same folder

The first use of a file on a machine reads the whole file, at 1 to 2 GB/s on one core. If the digest is right, a mark
for the file's name, size and time is written to the folder `checked` of the cache. Later uses find the mark and do not
read the file. Marks may be deleted at any time, because a file without a mark is read again.
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
from raycap.pipeline.storage.untrusted.documents import open_regular_file

DIGESTS = "digests.json"
FORMAT = 1
MAX_HOLES = 10  # a file with less than a tenth of its size on the disk is sparse, not merely compressed


def write_digests(folder: Path, names: Iterable[str] = ()) -> None:
    """Writes the digests.json of a folder. names: the files in it, by default all visible files of the folder."""
    path = folder / DIGESTS
    names = names or [file.name for file in folder.glob("[!.]*") if file != path]
    write_json(path, {"format": FORMAT, "files": {name: file_digest(folder / name) for name in sorted(names)}})


def digests_in(data: bytes, name: str) -> Values:
    """{file: SHA-256} from the content of a digests.json. name: for errors. Raises DamagedError if it is damaged."""
    content = decode_json(data, name)
    has_format = isinstance(content, dict) and content.get("format") == FORMAT
    if not has_format or not isinstance(content.get("files"), dict):
        raise DamagedError(f"{name} is damaged: it must have format {FORMAT} and the digests of files")
    return dict(content["files"])


def has_digest(path: Path, sha256: str) -> bool:
    """True if a local file has this digest. The file is read only if it has no mark from an earlier use."""
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
        with suppress(OSError):  # without a writable cache there are no marks, and each use reads the file
            write_bytes(mark, b"", durable=False)
    return True


def memory_bytes() -> int:
    """The physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def file_digest(path: Path) -> str:
    """The SHA-256 of a local file. Raises UserError if the file is sparse and larger than the memory.

    A sparse file of a tebibyte takes no space, but reading it would take hours. raycap writes no sparse files, so a
    sparse file is damaged.
    """
    status = path.stat()
    allocated = 512 * status.st_blocks
    if status.st_size > max(memory_bytes(), MAX_HOLES * allocated):
        raise UserError(
            f"{path} is damaged: it has {status.st_size} bytes, of which {allocated} are on the disk; restore it from "
            "a copy"
        )
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
