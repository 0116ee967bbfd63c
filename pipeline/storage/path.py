"""Files and folders, local or on S3, behind one small interface.

A `StoragePath` is a path or an `s3://bucket/key` with the options that reach it; it pickles, so that Ray's workers open
what the driver named. Every write becomes visible whole or not at all: by a rename on disk, by one put or a completed
multi-part upload on S3.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.storage.atomic import file_lock, write_bytes
from pipeline.storage.s3 import ConflictError, Entry, S3Object, StorageError, StorageOptions, is_remote

PROBE_ATTEMPTS = 2  # requests per call of `try_rights`; few, because a person waits for its answer


@dataclass(frozen=True)
class StoragePath:
    """A file or folder, local or on S3.

    Methods raise FileNotFoundError for what is missing and, on S3, StorageError after the last attempt.
    """

    uri: str
    options: StorageOptions = field(default_factory=StorageOptions)

    def __truediv__(self, name: str) -> StoragePath:
        return StoragePath(join(self.uri, name), self.options)

    def __str__(self) -> str:
        return self.uri

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def is_remote(self) -> bool:
        return is_remote(self.uri)

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def path(self) -> Path:
        """The local path; ValueError on S3."""
        if self.is_remote:
            raise ValueError(f"{self.uri} is not a local path")
        return Path(self.uri)

    def read_bytes(self) -> bytes:
        """The whole content of a file."""
        return self._object.get()[0] if self.is_remote else self.path.read_bytes()

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`."""
        if self.is_remote:
            return self._object.get(Range=f"bytes={start}-{start + length - 1}")[0]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def read_tagged(self) -> tuple[bytes, str]:
        """The whole content of a file with the tag of its content, for `write_if`."""
        if self.is_remote:
            return self._object.get()
        data = self.path.read_bytes()
        return data, _content_tag(data)

    def write_bytes(self, data: bytes | memoryview) -> str:
        """Replaces the file in one piece; makes the folders above it. Returns its new tag."""
        if self.is_remote:
            return self._object.put(data)
        write_bytes(self.path, data)
        return self.stat().tag

    def write_if(self, data: bytes, tag: str | None) -> str:
        """Replaces the file only while it is what `read_tagged` gave `tag` for (None: while there is none).

        Returns the new tag. Raises ConflictError when another writer was faster. `data` must be unique (hold a nonce),
        because on S3 a write whose answer was lost is recognized by its content.
        """
        return self._object.put_if(data, tag) if self.is_remote else _write_local_if(self.path, data, tag)

    def upload(self, source: Path) -> str:
        """Replaces the file by a copy of a local file, of any size. Returns its new tag."""
        return self._object.upload(source) if self.is_remote else self.write_bytes(source.read_bytes())

    def download(self, target: Path) -> Entry:
        """Copies one state of the file, of any size, to a local path; returns which."""
        if self.is_remote:
            return self._object.download(target)
        target.write_bytes(self.read_bytes())
        return self.stat()

    def stat(self) -> Entry:
        """Size and tag."""
        return self._object.head() if self.is_remote else _local_entry(self.path)

    def exists(self) -> bool:
        try:
            self.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self) -> dict[str, Entry]:
        """Every file below this folder by its relative name; empty when there is none."""
        return dict(self.walk())

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Yields what `list` returns, one file at a time and in no order."""
        return self._object.list() if self.is_remote else _list_local(self.path)

    def delete(self) -> None:
        """Removes a file; a missing one is no error."""
        if self.is_remote:
            self._object.delete()
        else:
            self.path.unlink(missing_ok=True)

    @property
    def _object(self) -> S3Object:
        return S3Object(self.uri, self.options)


def storage_path(where: StoragePath | Path | str, options: StorageOptions = StorageOptions()) -> StoragePath:
    """A StoragePath from what people write: a path (made absolute) or an s3:// URI."""
    if isinstance(where, StoragePath):
        return where
    if is_remote(str(where)):
        return StoragePath(str(where).rstrip("/"), options)
    return StoragePath(str(Path(where).expanduser().absolute()), options)


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _local_entry(path: Path) -> Entry:
    status = path.stat()
    return Entry(status.st_size, str(status.st_mtime_ns))


def _list_local(root: Path) -> Iterator[tuple[str, Entry]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            try:
                yield path.relative_to(root).as_posix(), _local_entry(path)
            except FileNotFoundError:  # renamed or removed since it was listed
                continue


def _content_tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _write_local_if(path: Path, data: bytes, tag: str | None) -> str:
    """Compares and replaces under a lock beside the file."""
    with file_lock(_lock_of(path)):
        current = _content_tag(path.read_bytes()) if path.exists() else None
        if current != tag:
            raise ConflictError(f"{path} was written by another process")
        write_bytes(path, data)
    return _content_tag(data)


def try_rights(folder: StoragePath) -> None:
    """Writes a small file on the condition that it is new, is refused a second time, reads, lists and removes it.

    Raises StorageError naming what cannot be done. Leases need storage that refuses the second write, because
    otherwise two writers could both succeed.
    """
    folder = StoragePath(folder.uri, replace(folder.options, max_attempts=PROBE_ATTEMPTS))
    probe = folder / f".raycap-probe-{uuid.uuid4().hex}"
    text, is_new = probe.name.encode(), not folder.is_remote and not folder.path.exists()
    try:
        if not _try_create(probe, text):
            raise StorageError(f"{folder}: a file with a new name is said to exist already")
        try:
            if _try_create(probe, b"second"):
                raise StorageError(f"{folder}: conditional writes are ignored; a second write replaced the first")
            if probe.read_bytes() != text:
                raise StorageError(f"{folder}: what was written is not what is read")
            if probe.name not in folder.list():
                raise StorageError(f"{folder}: a file that was written is not listed")
        finally:
            probe.delete()
            if not folder.is_remote:
                _lock_of(probe.path).unlink(missing_ok=True)
            if is_new:
                folder.path.rmdir()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error


def _try_create(probe: StoragePath, data: bytes) -> bool:
    """Writes a file on the condition that it is new. Returns False if the storage refuses."""
    try:
        probe.write_if(data, None)
    except ConflictError:
        return False
    return True
