"""Bounded caches of remote shards and images on the local disk: each fetched once a machine, checked by digest.

Processes on one machine share it under one file lock. When it is full the shards that were not asked for the longest
go first; a process that still maps one keeps reading it, because a removed file lives until its last reader lets go.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.storage.atomic import write_bytes
from pipeline.storage.path import StorageError, StoragePath

CACHE_VARIABLE = "RAYCAP_CACHE"


def cache_folder() -> Path:
    """$RAYCAP_CACHE, or ~/.cache/raycap."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "raycap").expanduser()


class ShardCache:
    """Local copies of remote files, at most `limit` bytes of them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, source: StoragePath, size: int, sha256: str) -> Path | None:
        """The local copy of `source`, fetched when it is not here; None when it alone is above the limit.

        Raises StorageError when what arrives is not what the manifest promised, also the second time.
        """
        if size > self.limit:
            return None
        path = self.folder / f"{sha256}{Path(source.name).suffix}"
        if self._touch(path):
            return path
        with self._alone(path.name):
            if self._touch(path):
                return path
            self._keep(path, _fetch(source, sha256))
        return path

    def read(self, source: StoragePath, sha256: str) -> bytes:
        """The content of a small file, from the local copy if there is one; what is above the limit is not kept."""
        path = self.folder / sha256
        if self._touch(path):
            with suppress(FileNotFoundError):  # it had to go in between
                return path.read_bytes()
        data = _fetch(source, sha256)
        if len(data) <= self.limit:
            self._keep(path, data)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        with self._alone("room"):
            self._make_room(len(data))
            write_bytes(path, data, durable=False)

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, wanted: int) -> None:
        files = []
        for path in self.folder.iterdir():
            if path.suffix not in (".lock",):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total + wanted <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One process at a time; the lock falls with the process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 16 if name != "room" else 16
        with (self.folder / f"{number}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class ImageCache:
    """Local copies of remote images, at most `limit` bytes, by content: an end-to-end stage reads them every epoch.

    They lie in 256 folders with a share of the limit each, because making room looks at a whole folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit // 256

    def read(self, source: StoragePath, key: str) -> bytes:
        """The image file; StorageError when it is no longer the one whose digest is `key`."""
        return ShardCache(self.folder / key[:2], self.limit).read(source, key)


def image_cache(gibibytes: float) -> ImageCache:
    """This machine's."""
    return ImageCache(cache_folder() / "images", int(gibibytes * 2**30))


def _fetch(source: StoragePath, sha256: str) -> bytes:
    for _ in range(2):
        data = source.read_bytes()
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    raise StorageError(f"{source}: its content does not have the digest that was noted; was it replaced meanwhile?")
