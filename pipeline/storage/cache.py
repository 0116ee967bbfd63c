"""Caches of remote shards and images on the local disk, with a limited size. Downloads are checked by digest.

All processes of a machine share a cache under file locks. A full cache removes the least recently used files. A process
that has mapped such a file can still read it, because the system frees a removed file after its last reader.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipeline.storage.atomic import file_lock, write_bytes
from pipeline.storage.path import StorageError, StoragePath

CACHE_VARIABLE = "RAYCAP_CACHE"
NUM_FILE_LOCKS = 16  # the hash of a file's name selects its lock
NUM_IMAGE_FOLDERS = 256  # the first two hexadecimal digits of an image's digest select its folder


def cache_folder() -> Path:
    """$RAYCAP_CACHE, or ~/.cache/raycap."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "raycap").expanduser()


class ShardCache:
    """Local copies of remote files, with at most `limit` bytes in all."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, source: StoragePath, size: int, sha256: str) -> Path | None:
        """The local copy of `source`, fetched if it is not cached; None for a file that exceeds the limit by itself.

        Raises StorageError when even a second download does not have the digest.
        """
        if size > self.limit:
            return None
        path = self.folder / f"{sha256}{Path(source.name).suffix}"
        if _touch(path):
            return path
        name_hash = int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16)
        with self._lock(name_hash % NUM_FILE_LOCKS):
            if not _touch(path):  # another process may have fetched the file while this one waited for the lock
                self._add(path, _fetch(source, sha256))
        return path

    def read(self, source: StoragePath, sha256: str) -> bytes:
        """The content of a small file, which is cached unless it exceeds the limit. Raises StorageError as `get`."""
        path = self.folder / sha256
        if _touch(path):
            with suppress(FileNotFoundError):  # another process has removed it to free space
                return path.read_bytes()
        data = _fetch(source, sha256)
        if len(data) <= self.limit:
            self._add(path, data)
        return data

    def _add(self, path: Path, data: bytes) -> None:
        """Writes a file, after removing the least recently used files until the new file fits within the limit."""
        with self._lock(NUM_FILE_LOCKS):  # the number after those of the files: one lock for all additions
            files = [(cached.stat(), cached) for cached in self.folder.iterdir() if cached.suffix != ".lock"]
            total = sum(status.st_size for status, _ in files) + len(data)
            for status, old_path in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if total <= self.limit:
                    break
                old_path.unlink(missing_ok=True)
                total -= status.st_size
            write_bytes(path, data, durable=False)

    def _lock(self, number: int) -> AbstractContextManager[None]:
        """The context in which this process has lock number `number` of the cache."""
        return file_lock(self.folder / f"{number}.lock")


class ImageCache:
    """Local copies of remote images, at most `limit` bytes, because an end-to-end stage reads every image per epoch.

    The images are divided among folders with an equal share of the limit, because adding an image lists its folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit // NUM_IMAGE_FOLDERS

    def read(self, source: StoragePath, sha256: str) -> bytes:
        """The content of an image file. Raises StorageError when it no longer has the digest."""
        return ShardCache(self.folder / sha256[:2], self.limit).read(source, sha256)


def image_cache(gibibytes: float) -> ImageCache:
    """The cache of this machine, with a limit in GiB."""
    return ImageCache(cache_folder() / "images", int(gibibytes * 2**30))


def _touch(path: Path) -> bool:
    """Marks a file as recently used. Returns False when it does not exist."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _fetch(source: StoragePath, sha256: str) -> bytes:
    """Downloads a file, and a second time if its digest is wrong. Raises StorageError if it is wrong again."""
    for _ in range(2):
        data = source.read_bytes()
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise StorageError(f"{source}: its content does not have the recorded digest; was it replaced meanwhile?")
