"""Caches of remote shards and images on the local disk, of bounded size: each is fetched once and checked by digest.

All processes of a machine share a cache under file locks. A full cache removes the files that were used least recently;
a process that has mapped such a file keeps reading it, because the system frees a removed file after its last reader.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipeline.storage.atomic import file_lock, write_bytes
from pipeline.storage.path import StorageError, StoragePath

CACHE_VARIABLE = "RAYCAP_CACHE"
NUM_FILE_LOCKS = 16  # the hash of a file's name decides which of these locks it uses
NUM_IMAGE_FOLDERS = 256


def cache_folder() -> Path:
    """$RAYCAP_CACHE, or ~/.cache/raycap."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "raycap").expanduser()


class ShardCache:
    """Local copies of remote files, at most `limit` bytes of them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, source: StoragePath, size: int, sha256: str) -> Path | None:
        """The local copy of `source`, fetched if it is not cached; None when it exceeds the limit by itself.

        Raises StorageError when the content does not have the digest, also after a second download.
        """
        if size > self.limit:
            return None
        path = self.folder / f"{sha256}{Path(source.name).suffix}"
        if _touch(path):
            return path
        with self._lock(int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16) % NUM_FILE_LOCKS):
            if not _touch(path):
                self._add(path, _fetch(source, sha256))
        return path

    def read(self, source: StoragePath, sha256: str) -> bytes:
        """The content of a small file, from the local copy if there is one; files above the limit are not cached."""
        path = self.folder / sha256
        if _touch(path):
            with suppress(FileNotFoundError):  # another process has removed it to free space
                return path.read_bytes()
        data = _fetch(source, sha256)
        if len(data) <= self.limit:
            self._add(path, data)
        return data

    def _add(self, path: Path, data: bytes) -> None:
        with self._lock(NUM_FILE_LOCKS):
            self._free(len(data))
            write_bytes(path, data, durable=False)

    def _free(self, num_bytes: int) -> None:
        """Removes the files used least recently until `num_bytes` more are within the limit."""
        files = []
        for path in self.folder.iterdir():
            if path.suffix != ".lock":
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + num_bytes <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _lock(self, number: int) -> AbstractContextManager[None]:
        return file_lock(self.folder / f"{number}.lock")


class ImageCache:
    """Local copies of remote images by content, at most `limit` bytes: an end-to-end stage reads them every epoch.

    They are divided among folders with an equal share of the limit, because freeing space lists a whole folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit // NUM_IMAGE_FOLDERS

    def read(self, source: StoragePath, sha256: str) -> bytes:
        """The image file; StorageError when its content no longer has the digest."""
        return ShardCache(self.folder / sha256[:2], self.limit).read(source, sha256)


def image_cache(gibibytes: float) -> ImageCache:
    """This machine's cache of images."""
    return ImageCache(cache_folder() / "images", int(gibibytes * 2**30))


def _touch(path: Path) -> bool:
    """Marks a file as used; False when it does not exist."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _fetch(source: StoragePath, sha256: str) -> bytes:
    for _ in range(2):
        data = source.read_bytes()
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise StorageError(f"{source}: its content does not have the recorded digest; was it replaced meanwhile?")
