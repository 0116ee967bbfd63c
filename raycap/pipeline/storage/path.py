"""One interface for files and folders on the local disk or on S3.

A `StoragePath` can be pickled, so Ray's workers can open the driver's files. Every write is atomic: a rename on disk,
and on S3 one put or the completion of a multi-part upload.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from raycap.pipeline.runtime.names import expanded_path
from raycap.pipeline.storage.atomic import file_lock, write_bytes
from raycap.pipeline.storage.s3 import ConflictError, Entry, S3Object, StorageError, StorageOptions, is_remote
from raycap.pipeline.storage.untrusted.documents import RangedFile, open_regular_file, read_regular_file

CACHE_VARIABLE = "RAYCAP_CACHE"
PRIVATE = stat.S_IRWXU  # the permissions of the cache's folder: only its user may enter
UNLISTED = "folders that cannot be listed"
REMOTE_BUFFER_BYTES = 2**18  # per request to S3, because smaller requests would hardly be faster
MAX_TAGGED_BYTES = 2**24  # limit for files read with tags: leases and champion.json, which are much smaller


@dataclass(frozen=True)
class StoragePath:
    """A file or folder, local or on S3.

    Methods raise FileNotFoundError if a file is missing. On S3 they raise StorageError if a request is refused or has
    failed for `options.retry_minutes`.
    """

    uri: str  # a local path, or s3://bucket/key
    options: StorageOptions = field(default_factory=StorageOptions)

    def __truediv__(self, name: str) -> StoragePath:
        return StoragePath(join(self.uri, name), self.options)

    def __str__(self) -> str:
        return self.uri

    @property
    def is_remote(self) -> bool:
        return is_remote(self.uri)

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rsplit("/", 1)[-1]

    @property
    def path(self) -> Path:
        """The local path. Raises ValueError on S3."""
        if self.is_remote:
            raise ValueError(f"{self.uri} is not a local path")
        return Path(self.uri)

    def require_answer(self) -> None:
        """Raises an error within seconds if a folder on S3 cannot be reached. Other methods retry for minutes."""
        if self.is_remote:
            S3Object(self.uri, self.options.hasty).require_answer()

    def read_bytes(self, max_bytes: int | None = None) -> bytes:
        """The content of a file. Raises OSError if it is a pipe or device, or has more than `max_bytes` bytes."""
        return self._object.get(max_bytes)[0] if self.is_remote else read_regular_file(self.path, max_bytes)

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`, or fewer at the end of the file."""
        if self.is_remote:
            return self._object.get(Range=f"bytes={start}-{start + length - 1}")[0]
        with open_regular_file(self.path) as file:
            return os.pread(file.fileno(), length, start)

    def open(self) -> BinaryIO:
        """Opens a file for reading at any position. On S3 each read outside of the buffer is one ranged request.

        Raises OSError for a folder, pipe or device.
        """
        if not self.is_remote:
            return open_regular_file(self.path)
        return cast("BinaryIO", io.BufferedReader(RangedFile(self.stat().size, self.read_range), REMOTE_BUFFER_BYTES))

    def read_tagged(self) -> tuple[bytes, str]:
        """The content of a small file, and the tag by which `write_if` recognizes this content.

        Raises OSError for a folder, pipe or device, and for a file of more than MAX_TAGGED_BYTES.
        """
        if self.is_remote:
            return self._object.get(MAX_TAGGED_BYTES)
        data = read_regular_file(self.path, MAX_TAGGED_BYTES)
        return data, _content_tag(data)

    def write_bytes(self, data: bytes | memoryview) -> str:
        """Replaces the file, and creates missing folders above it. Returns the new tag."""
        if self.is_remote:
            return self._object.put(io.BytesIO(data), len(data))
        write_bytes(self.path, data)
        return self.stat().tag

    def write_if(self, data: bytes, tag: str | None) -> str:
        """Replaces the file if it still has the `tag` that `read_tagged` gave, and returns the new tag.

        If the tag is None, the file must not exist yet. Raises ConflictError if another writer was faster. `data` must
        be unique, for example by a nonce. If the answer to a write on S3 is lost, only the content shows its success.
        """
        if self.is_remote:
            return self._object.put_if(data, tag)
        with file_lock(self._lock):
            current = self.read_tagged()[1] if self.path.exists() else None
            if current != tag:
                raise ConflictError(f"{self.path} was written by another process")
            write_bytes(self.path, data)
        return _content_tag(data)

    def upload(self, source: Path) -> str:
        """Replaces an object on S3 with a local file of any size. Returns the object's new tag."""
        with source.open("rb") as file:
            return self._object.put(file, source.stat().st_size)

    def download(self, target: Path) -> Entry:
        """Downloads one version of an object on S3 to a local path. Returns the version's size and tag."""
        return self._object.download(target)

    def stat(self) -> Entry:
        """The size and tag of a file."""
        return self._object.head() if self.is_remote else _local_entry(self.path)

    def exists(self) -> bool:
        try:
            self.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self) -> dict[str, Entry]:
        """The files below this folder by their relative names. A missing folder has none."""
        return dict(self.walk())

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Yields the items of `list` one by one, in any order.

        Raises OSError if the folder exists and cannot be listed. Skips files and folders below it that cannot be read,
        such as a link to itself.
        """
        if self.is_remote:
            yield from self._object.list()
            return
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path):
            pass  # scandir raises an error for an unreadable folder, which os.walk would ignore
        for folder, _, names in os.walk(self.path):
            for path in (Path(folder) / name for name in names):
                with suppress(OSError):  # renamed or removed since it was listed, or a link to itself
                    yield path.relative_to(self.path).as_posix(), _local_entry(path)

    def names(self, leave_out: Callable[[str, str], None] = lambda _kind, _name: None) -> Iterator[str]:
        """Yields the relative name of each file below this folder, also behind links to folders, and of broken links.

        A folder is read once, so that no link leads in circles. Links to folders above this one are not followed.
        leave_out: called with (kind, name) for each link and folder that is not read. Raises OSError if the folder
        exists and cannot be listed.
        """
        if self.is_remote:
            yield from (name for name, _ in self._object.list())
            return
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path):
            pass  # as in `walk`
        links, known, start = [self.uri], set[str](), len(f"{self.uri.rstrip('/')}/")
        for link in links:  # which the loop appends to
            if os.path.realpath(link) in known:
                leave_out("links to folders that are read under another name", link)
                continue
            if link != self.uri and os.path.realpath(self.uri).startswith(os.path.realpath(link).rstrip("/") + "/"):
                leave_out("links to folders above them", link)
                continue
            for folder, folders, files in os.walk(link, onerror=lambda error: leave_out(UNLISTED, error.filename)):
                real, prefix = os.path.realpath(folder), f"{folder.rstrip('/')}/"
                if real in known:
                    folders.clear()
                    continue
                known.add(real)
                folders.sort()
                links += filter(os.path.islink, (prefix + name for name in folders))
                yield from ((prefix + name)[start:] for name in files)

    def delete(self) -> None:
        """Removes a file. A missing file is no error."""
        if self.is_remote:
            self._object.delete()
        else:
            self.path.unlink(missing_ok=True)

    def delete_folder(self) -> None:
        """Removes a folder and all below it. A missing folder is no error. On S3, sends one request per object."""
        if self.is_remote:
            for name in self.list():
                (self / name).delete()
        else:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def _lock(self) -> Path:
        """The file that `write_if` locks while it replaces a local file."""
        return self.path.with_name(f".{self.name}.lock")

    @property
    def _object(self) -> S3Object:
        return S3Object(self.uri, self.options)


def storage_path(path: StoragePath | Path | str, options: StorageOptions = StorageOptions()) -> StoragePath:
    """A StoragePath for a local path or an s3:// URI. Local paths are made absolute, without "..".

    Raises UserError if a path begins with ~ and names no user's home, such as ~nobody.
    """
    if isinstance(path, StoragePath):
        return path
    if is_remote(str(path)):
        return StoragePath(str(path).rstrip("/"), options)
    return StoragePath(os.path.abspath(expanded_path(path)), options)  # noqa: PTH100 (Path.absolute keeps "..")


def join(folder: str, name: str) -> str:
    """The path or URI of `name` in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def _local_entry(path: Path) -> Entry:
    status = path.stat()
    return Entry(status.st_size, str(status.st_mtime_ns), status.st_mtime)


def _content_tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def try_rights(folder: StoragePath) -> None:
    """Raises StorageError if conditional writes, reads or deletions fail in a folder.

    The storage must refuse the second of two writes of a new file. Otherwise two processes could get the same lease.
    """
    probe = _probe(folder)
    try:
        probe.write_if(b"first", None)
        try:
            probe.write_if(b"second", None)
            raise StorageError(f"{folder}: conditional writes are ignored; a second write replaced the first")
        except ConflictError:
            probe.read_bytes()
        finally:
            probe.delete()
            if not folder.is_remote:
                probe._lock.unlink(missing_ok=True)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error


def try_writing(folder: StoragePath) -> None:
    """Raises StorageError if no file can be written in a folder on S3.

    If this user may not remove files there, an empty file remains.
    """
    probe = _probe(folder)
    try:
        probe.write_bytes(b"")
    except FileNotFoundError as error:
        raise StorageError(f"{folder}: {error.strerror or error}") from error
    with suppress(StorageError):
        probe.delete()


def _probe(folder: StoragePath) -> StoragePath:
    """The path of a new file in a folder. Its requests fail within seconds, because a person waits for them."""
    return StoragePath(folder.uri, folder.options.hasty) / f".raycap-probe-{uuid.uuid4().hex}"


def cache_folder() -> Path:
    """The folder of all caches: $RAYCAP_CACHE, or ~/.cache/raycap.

    A missing folder is created for this user alone, because copies of private data in it may be readable by everybody.
    An existing folder keeps its permissions.
    """
    folder = expanded_path(os.environ.get(CACHE_VARIABLE) or "~/.cache/raycap")
    with suppress(OSError):  # a later write reports the problem
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    return folder
