"""Caches remote shards and images on the local disk, up to a size limit. Every file is checked by its digest.

All processes of a machine share a cache under file locks. A full cache removes the least recently used files. A process
that has mapped a removed file can still read it.

By default a cache fills at most half of the usable space. The usable space is the free space plus the cache's own size,
so the limit does not change while the cache grows. A reserve of the disk always stays free.

A copy of a shard is hashed at its first use (`pipeline.storage.digests`), and a copy of an image at each use. A copy
that a power cut has damaged is thus found and downloaded again, so copies are written without a flush to the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from raycap.pipeline.runtime.names import printable
from raycap.pipeline.storage.atomic import file_lock, write_bytes
from raycap.pipeline.storage.digests import has_digest
from raycap.pipeline.storage.path import StoragePath, cache_folder
from raycap.pipeline.storage.s3 import StorageError

# The variable with the cache volume's size in GiB, because an emptyDir of Kubernetes reports the whole disk's size.
SIZE_VARIABLE = "RAYCAP_CACHE_GIB"
CACHE_SHARE = 0.5  # of the usable space, as the default limit
RESERVE_SHARE, RESERVE_BYTES = 0.1, 10 * 2**30  # a tenth of the disk stays free, but at most 10 GiB
COUNT_EVERY = 16  # one of 16 image folders is measured, to estimate the size of the whole cache
IMAGES = "images"  # the folder of the images
NUM_IMAGE_FOLDERS = 256  # the first two hexadecimal digits of an image's digest select its folder
_DIGEST = re.compile("[0-9a-f]{64}")


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder, without the reserve. Negative if less than the reserve is free.

    The folder need not exist yet.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return usage.free - min(int(RESERVE_SHARE * usage.total), RESERVE_BYTES)


def cache_limit(folder: Path, held: int, most: int | None) -> int:
    """The size limit of a cache in bytes. held: its present size in bytes.

    most: the configured limit in bytes. If it is None, the limit is half of the usable space.
    """
    space = max(0, free_bytes(folder) + held)
    if volume := os.environ.get(SIZE_VARIABLE):
        space = min(space, int(float(volume) * 2**30))
    return int(CACHE_SHARE * space) if most is None else min(most, space)


def cached_files(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """(status, path) of each cached file in a folder, which may be missing. Skips files that are removed meanwhile."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.suffix != ".lock":
                found.append((path.stat(), path))
    return found


def used_bytes(folder: Path) -> int:
    """The total size of the cached files in a folder, in bytes."""
    return sum(status.st_size for status, _ in cached_files(folder))


class ChangedError(StorageError):
    """A stored file does not have its recorded digest, because it is damaged or was replaced."""


class Readable(Protocol):
    """A file, or a part of one, that can be read. Its `str` names it in errors."""

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """Returns the content. Raises OSError if the content has more than `max_bytes` bytes."""


class ShardCache:
    """Local copies of remote files, at most `limit` bytes in total."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, source: StoragePath, size: int, sha256: str) -> Path | None:
        """Returns the local copy of `source`, and downloads it first if it is not cached.

        Returns None if there is no room for a file of `size` bytes. Raises ChangedError if two downloads do not have
        the digest, and StorageError if `sha256` is not a digest.
        """
        path = self.folder / f"{_require_digest(sha256, source)}{Path(source.name).suffix}"
        if _use(path, sha256):
            return path
        with file_lock(self.folder / f"{sha256[0]}.lock"):  # one of 16 locks, so that few downloads must wait
            if _use(path, sha256):  # another process has added the file while this one waited
                return path
            path.unlink(missing_ok=True)  # removes a damaged copy
            if size > min(self.limit, free_bytes(self.folder) + used_bytes(self.folder)):
                return None
            return path if self.add(path, _fetch(source, sha256)) else None

    def add(self, path: Path, data: bytes) -> bool:
        """Writes a file. Before that, removes the least recently used files until the new one fits.

        Returns False without writing if the limit or the disk has no room for it.
        """
        if len(data) > self.limit:
            return False
        with file_lock(self.folder / "add.lock"):
            files = cached_files(self.folder)
            excess = sum(status.st_size for status, _ in files) + len(data) - self.limit
            excess = max(excess, len(data) - free_bytes(self.folder))
            for status, old_path in sorted(files, key=lambda file: file[0].st_atime_ns):
                if excess <= 0:
                    break
                old_path.unlink(missing_ok=True)
                excess -= status.st_size
            if len(data) > free_bytes(self.folder):  # a removed file takes space while a process maps it
                return False
            write_bytes(path, data, durable=False)
        return True


class ImageCache:
    """Local copies of remote images, at most `limit` bytes in total, for all commands and epochs.

    Adding an image lists its folder, so the images are divided among folders. Each has an equal share of the limit.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit // NUM_IMAGE_FOLDERS

    def read(self, source: Readable, sha256: str, max_bytes: int | None = None) -> bytes:
        """Returns the content of an image file from the cache. If it is not cached, downloads and caches it.

        Raises StorageError if the download does not have the digest, and OSError if it has more than `max_bytes` bytes.
        """
        data = self.find(_require_digest(sha256, source))
        if data is None:
            data = _fetch(source, sha256, max_bytes)
            self.add(sha256, data)
        return data

    def find(self, sha256: str) -> bytes | None:
        """The content of the cached image with this digest. None if it is not cached or `sha256` is not a digest."""
        if not _DIGEST.fullmatch(sha256):
            return None
        path = self._path(sha256)
        with suppress(FileNotFoundError):  # the image is not cached, or another process has removed it to free space
            _touch(path)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            path.unlink()  # removes a damaged copy
        return None

    def add(self, sha256: str, data: bytes) -> None:
        """Caches an image with this digest if there is room for it."""
        path = self._path(sha256)
        ShardCache(path.parent, self.limit).add(path, data)

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256


def shard_cache(most: int | None, folder: Path | None = None) -> ShardCache:
    """This machine's cache of shards. most: its limit in bytes. If it is None, half of the usable space."""
    folder = folder or cache_folder() / "shards"
    return ShardCache(folder, cache_limit(folder, used_bytes(folder), most))


def image_cache(most: int | None) -> ImageCache:
    """This machine's cache of images. most: its limit in bytes. If it is None, half of the usable space."""
    folder = cache_folder() / IMAGES
    counted = range(0, NUM_IMAGE_FOLDERS, COUNT_EVERY)  # the folders have nearly equal sizes
    held = COUNT_EVERY * sum(used_bytes(folder / f"{number:02x}") for number in counted)
    return ImageCache(folder, cache_limit(folder, held, most))


def cached_image(sha256: str) -> bytes | None:
    """The content of the image with this digest from this machine's cache. None if it is not cached."""
    return ImageCache(cache_folder() / IMAGES, limit=0).find(sha256)


def _require_digest(text: str, source: Readable) -> str:
    """Returns `text` if it is a digest, and raises StorageError otherwise, because other file names are unsafe."""
    if not _DIGEST.fullmatch(text):
        raise StorageError(f"{source}: the digest recorded for it is {printable(text)[:80]!r}, not a SHA-256")
    return text


def _use(path: Path, sha256: str) -> bool:
    """Marks a cached file as used now. Returns False if the file is missing or does not have the digest."""
    with suppress(FileNotFoundError):
        _touch(path)
        return has_digest(path, sha256)
    return False


def _touch(path: Path) -> None:
    """Sets the access time of a file to now. The modification time stays, because the marks of digests contain it."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _fetch(source: Readable, sha256: str, max_bytes: int | None = None) -> bytes:
    """Downloads a file, and once more if the digest is wrong. Raises ChangedError if the second digest is wrong too."""
    for _ in range(2):
        data = source.read_bytes(max_bytes)
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise ChangedError(f"{source}: its content does not have the recorded digest; was it replaced meanwhile?")
