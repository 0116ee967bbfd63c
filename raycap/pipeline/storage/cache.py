"""Caches of remote shards and images on the local disk, with a limited size. Every file is checked by its digest.

All processes of a machine share a cache under file locks. A full cache removes the least recently used files. A process
that has mapped such a file can still read it, because the system frees a removed file after its last reader.

By default a cache takes at most half of the space that it can use: what is free and what it holds already. So the limit
does not change while the cache grows, and processes that start at different times have the same one. The other half is
for the other cache, the copies of runs (`pipeline.storage.mirror`), checkpoints, and what Ray spills. Nothing is added
that would leave less than a reserve of the disk, whatever the limit is.

A copy of a shard is hashed at its first use after the download, at 1 to 2 GB/s. A mark then remembers it
(`pipeline.storage.digests`), and further uses cost a few system calls. A copy of an image is hashed at each use, which
takes a tenth of a millisecond for a photograph, a small part of its decoding. A damaged copy is fetched again, also one
that a power cut has left incomplete. Therefore copies are written without waiting for the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from raycap.pipeline.runtime.names import printable
from raycap.pipeline.storage.atomic import file_lock, write_bytes
from raycap.pipeline.storage.digests import has_digest
from raycap.pipeline.storage.path import StoragePath, cache_folder
from raycap.pipeline.storage.s3 import StorageError

# The size in GiB of the cache's volume, for an emptyDir of Kubernetes: the system reports the size of the whole disk.
SIZE_VARIABLE = "RAYCAP_CACHE_GIB"
CACHE_SHARE = 0.5  # of the space that a cache can use
RESERVE_SHARE, RESERVE_BYTES = 0.1, 10 * 2**30  # the smaller one of a tenth of the disk and this number stays free
NUM_FILE_LOCKS = 16  # the hash of a file's name selects its lock
COUNT_EVERY = 16  # one in so many folders of images is counted for the size of the cache
IMAGES = "images"  # the folder of the images
NUM_IMAGE_FOLDERS = 256  # the first two hexadecimal digits of an image's digest select its folder
_DIGEST = re.compile("[0-9a-f]{64}")


def free_bytes(folder: Path) -> int:
    """The bytes that caches may still write to the disk of a folder, which need not exist yet.

    Negative when less than the reserve is free.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return usage.free - min(int(RESERVE_SHARE * usage.total), RESERVE_BYTES)


def usable_bytes(folder: Path, held: int) -> int:
    """The size that a folder with `held` bytes can reach: as much as is free, within the size of its volume."""
    volume = os.environ.get(SIZE_VARIABLE)
    space = max(0, free_bytes(folder) + held)
    return space if not volume else min(space, int(float(volume) * 2**30))


def cache_limit(folder: Path, held: int, most: int | None) -> int:
    """The size in bytes of a cache that holds `held` bytes. most: the configured limit; None: half of the space."""
    space = usable_bytes(folder, held)
    return int(CACHE_SHARE * space) if most is None else min(most, space)


def used_bytes(folders: Iterable[Path]) -> int:
    """The size of the files in these folders of caches, which need not exist."""
    return sum(status.st_size for folder in folders for status, _ in cached_files(folder))


def cached_files(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """The cached files in a folder, without those that another process removes meanwhile."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.suffix != ".lock":
                found.append((path.stat(), path))
    return found


class ChangedError(StorageError):
    """A stored file does not have its digest: it is damaged, or was replaced."""


class Readable(Protocol):
    """A file, or a part of one. Its text names it in errors."""

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """The content. Raises OSError for more than `max_bytes` bytes."""


class ShardCache:
    """Local copies of remote files, with at most `limit` bytes in all."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def _path(self, source: StoragePath, sha256: str) -> Path:
        return self.folder / f"{_require_digest(sha256, source)}{Path(source.name).suffix}"

    def get(self, source: StoragePath, size: int, sha256: str) -> Path | None:
        """The local copy of `source`, fetched if it is not cached; None if the limit or the disk has no room for it.

        Raises ChangedError when even a second download does not have the digest.
        """
        path = self._path(source, sha256)
        if _use(path, sha256):
            return path
        name_hash = int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16)
        with self._lock(name_hash % NUM_FILE_LOCKS):
            if not _use(path, sha256):  # another process may have fetched it while this one waited for the lock
                path.unlink(missing_ok=True)  # it is damaged
                if size > min(self.limit, free_bytes(self.folder) + used_bytes([self.folder])):
                    return None
                return path if self._add(path, _fetch(source, sha256)) else None
        return path

    def _add(self, path: Path, data: bytes) -> bool:
        """Writes a file, after removing the least recently used files until the new file fits within the limit.

        Returns False without writing if the limit or the disk has no room for it.
        """
        if len(data) > self.limit:
            return False
        with self._lock(NUM_FILE_LOCKS):  # the number after those of the files: one lock for all additions
            files = cached_files(self.folder)
            excess = sum(status.st_size for status, _ in files) + len(data) - self.limit
            excess = max(excess, len(data) - free_bytes(self.folder))
            for status, old_path in sorted(files, key=lambda file: file[0].st_atime_ns):
                if excess <= 0:
                    break
                old_path.unlink(missing_ok=True)
                excess -= status.st_size
            if len(data) > free_bytes(self.folder):  # a removed file that a process has mapped is not freed yet
                return False
            write_bytes(path, data, durable=False)
        return True

    def _lock(self, number: int) -> AbstractContextManager[None]:
        """The context in which this process has lock number `number` of the cache."""
        return file_lock(self.folder / f"{number}.lock")


class ImageCache:
    """Local copies of remote images, at most `limit` bytes, because commands and epochs read the same images.

    The images are divided among folders with an equal share of the limit, because adding an image lists its folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit // NUM_IMAGE_FOLDERS

    def read(self, source: Readable, sha256: str, max_bytes: int | None = None) -> bytes:
        """The content of an image file, which is cached. Raises StorageError when it no longer has the digest.

        Raises OSError when it has more than `max_bytes` bytes.
        """
        data = self.find(_require_digest(sha256, source))
        if data is None:
            data = _fetch(source, sha256, max_bytes)
            self.add(sha256, data)
        return data

    def find(self, sha256: str) -> bytes | None:
        """The content of the cached image with this digest; None if there is none, or for a text that is no digest."""
        if not _DIGEST.fullmatch(sha256):
            return None
        path = self._path(sha256)
        with suppress(FileNotFoundError):  # not cached, or removed by another process to free space
            _touch(path)
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            path.unlink()  # it is damaged
        return None

    def add(self, sha256: str, data: bytes) -> None:
        """Caches an image with this digest if there is room for it."""
        path = self._path(sha256)
        ShardCache(path.parent, self.limit)._add(path, data)

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / sha256


def shard_cache(most: int | None, folder: Path | None = None) -> ShardCache:
    """This machine's cache of shards. most: the configured limit in bytes; None: half of the disk's free space."""
    folder = folder or cache_folder() / "shards"
    return ShardCache(folder, cache_limit(folder, used_bytes([folder]), most))


def image_cache(most: int | None) -> ImageCache:
    """This machine's cache of images; `most` as for `shard_cache`."""
    folder = cache_folder() / IMAGES
    counted = [folder / f"{number:02x}" for number in range(0, NUM_IMAGE_FOLDERS, COUNT_EVERY)]  # the shares are equal
    return ImageCache(folder, cache_limit(folder, COUNT_EVERY * used_bytes(counted), most))


def cached_image(sha256: str) -> bytes | None:
    """The content of the image with this digest in this machine's cache; None if there is none."""
    return ImageCache(cache_folder() / IMAGES, limit=0).find(sha256)


def _require_digest(text: str, source: Readable) -> str:
    """Returns the digest of a file, which becomes a local file's name. Raises StorageError for any other text."""
    if not _DIGEST.fullmatch(text):
        raise StorageError(f"{source}: the digest recorded for it is {printable(text)[:80]!r}, not a SHA-256")
    return text


def _use(path: Path, sha256: str) -> bool:
    """Marks a file as recently used. Returns False when it does not exist or does not have the digest."""
    with suppress(FileNotFoundError):
        _touch(path)
        return has_digest(path, sha256)
    return False


def _touch(path: Path) -> None:
    """Marks a file as used now. The time of its last change remains, by which marks recognize the file."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _fetch(source: Readable, sha256: str, max_bytes: int | None = None) -> bytes:
    """Downloads a file, and a second time if its digest is wrong. Raises ChangedError if it is wrong again."""
    for _ in range(2):
        data = source.read_bytes(max_bytes)
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise ChangedError(f"{source}: its content does not have the recorded digest; was it replaced meanwhile?")
