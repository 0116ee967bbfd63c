"""Where things lie: local folders and S3 behind one small interface; the only home of boto3.

A `StoragePath` is a path or an `s3://bucket/key` with the options that reach it; it pickles, so that Ray's workers
open what the driver named. Every write becomes visible whole or not at all: a temporary name and a rename on disk, one
put (or a completed multi-part upload) on S3. Every S3 call is repeated after failures that pass, with growing random
pauses.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.storage.atomic import write_bytes

T = TypeVar("T")
REMOTE = "s3://"
PART_BYTES = 32 * 2**20  # objects above twice this go up in parts
ATTEMPTS = 8  # with the pauses below: gives up after about half a minute
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 8.0


class StorageError(OSError):
    """Storage that still fails after every retry; the message names the URI."""


class ConflictError(OSError):
    """A conditional write that came too late: somebody else has written meanwhile."""


class Entry(NamedTuple):
    """What a listing knows without reading: size in bytes, and a tag that changes with the content."""

    size: int
    tag: str  # modification time in ns, or the ETag


@dataclass(frozen=True)
class StorageOptions:
    """How S3 is reached; what is None comes from the usual AWS places (environment, profile, instance role)."""

    endpoint_url: str | None = None
    region: str | None = None


@dataclass(frozen=True)
class StoragePath:
    """A file or folder, local or on S3."""

    uri: str
    options: StorageOptions = StorageOptions()

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
        """The local path; ValueError for a remote place."""
        if self.is_remote:
            raise ValueError(f"{self.uri} is not a local path")
        return Path(self.uri)

    def read_bytes(self) -> bytes:
        """All of a file. FileNotFoundError when it is not there, StorageError after the last retry."""
        if not self.is_remote:
            return self.path.read_bytes()
        return _retried(self.uri, lambda: self._get({}))

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`."""
        if not self.is_remote:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(length)
        return _retried(self.uri, lambda: self._get({"Range": f"bytes={start}-{start + length - 1}"}))

    def write_bytes(self, data: bytes | memoryview) -> str:
        """Replaces the file in one piece; makes the folders above it. Returns its new tag."""
        if not self.is_remote:
            write_bytes(self.path, data)
            return self.stat().tag
        if len(data) > 2 * PART_BYTES:
            return self._put_in_parts(memoryview(data))
        bucket, key = split_uri(self.uri)
        put = _retried(self.uri, lambda: self._client.put_object(Bucket=bucket, Key=key, Body=bytes(data)))
        return str(put["ETag"])

    def read_tagged(self) -> tuple[bytes, str]:
        """All of a file with the tag of its content, for `write_if`; FileNotFoundError when it is not there."""
        if not self.is_remote:
            data = self.path.read_bytes()
            return data, _content_tag(data)
        return _retried(self.uri, lambda: self._get_tagged({}))

    def write_if(self, data: bytes, tag: str | None, attempts: int = ATTEMPTS) -> str:
        """Replaces the file only while it is what `read_tagged` gave `tag` for (None: while it is not there).

        Returns the new tag; raises ConflictError when somebody else was faster, FileNotFoundError without the bucket.
        `data` must be like nobody else's (hold a nonce): a put whose answer got lost is known again by its content.
        `attempts` counts requests to S3 that fail but may pass.
        """
        if not self.is_remote:
            return _write_local_if(self.path, data, tag)
        bucket, key = split_uri(self.uri)
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            return _retried(self.uri, lambda: self._put_if(bucket, key, data, condition), attempts)
        except ConflictError as error:
            try:
                there, now = self.read_tagged()
            except FileNotFoundError:
                there, now = b"", ""
            if there == data:
                return now
            raise ConflictError(f"{self.uri} was written by somebody else") from error

    def stat(self) -> Entry:
        """Size and tag; FileNotFoundError when it is not there."""
        if not self.is_remote:
            status = self.path.stat()
            return Entry(status.st_size, str(status.st_mtime_ns))
        bucket, key = split_uri(self.uri)
        head = _retried(self.uri, lambda: self._client.head_object(Bucket=bucket, Key=key))
        return Entry(head["ContentLength"], head["ETag"])

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
        """As `list`, a file at a time and in no order."""
        return self._list_remote() if self.is_remote else self._list_local()

    def delete(self) -> None:
        """Removes a file; it may be gone already."""
        if not self.is_remote:
            self.path.unlink(missing_ok=True)
            return
        bucket, key = split_uri(self.uri)
        _retried(self.uri, lambda: self._client.delete_object(Bucket=bucket, Key=key))

    @property
    def _client(self) -> Any:
        return _client(self.options, os.getpid())

    def _get(self, extra: dict[str, str]) -> bytes:
        return self._get_tagged(extra)[0]

    def _get_tagged(self, extra: dict[str, str]) -> tuple[bytes, str]:
        bucket, key = split_uri(self.uri)
        response = self._client.get_object(Bucket=bucket, Key=key, **extra)
        data: bytes = response["Body"].read()
        if len(data) != response["ContentLength"]:
            raise ConnectionError(f"{self.uri}: {len(data)} of {response['ContentLength']} bytes came")
        return data, str(response["ETag"])

    def _put_if(self, bucket: str, key: str, data: bytes, condition: dict[str, str]) -> str:
        from botocore.exceptions import ClientError

        try:
            return str(self._client.put_object(Bucket=bucket, Key=key, Body=data, **condition)["ETag"])
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status == 412 or (status == 404 and "IfMatch" in condition):  # replaced, or removed
                raise ConflictError(f"{self.uri} was written by somebody else") from error
            if status == 409:  # another conditional write is under way; S3 asks to try again
                raise ConnectionError(f"{self.uri}: another write is under way") from error
            raise

    def _put_in_parts(self, data: memoryview) -> str:
        bucket, key = split_uri(self.uri)
        where = {"Bucket": bucket, "Key": key}
        upload = _retried(self.uri, lambda: self._client.create_multipart_upload(**where))["UploadId"]
        try:
            parts = []
            for number, start in enumerate(range(0, len(data), PART_BYTES), 1):
                body = bytes(data[start : start + PART_BYTES])
                sent = _retried(
                    self.uri,
                    lambda body=body, number=number: self._client.upload_part(  # type: ignore[misc]
                        **where, UploadId=upload, PartNumber=number, Body=body
                    ),
                )
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            done = {"Parts": parts}
            whole = _retried(
                self.uri,
                lambda: self._client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload=done),
            )
            return str(whole["ETag"])
        except BaseException:
            self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    def _list_local(self) -> Iterator[tuple[str, Entry]]:
        root = self.path
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder) / name
                try:
                    status = path.stat()
                except FileNotFoundError:  # renamed or removed since it was listed
                    continue
                yield path.relative_to(root).as_posix(), Entry(status.st_size, str(status.st_mtime_ns))

    def _list_remote(self) -> Iterator[tuple[str, Entry]]:
        bucket, key = split_uri(self.uri)
        prefix = f"{key.rstrip('/')}/" if key else ""
        asked = {"Bucket": bucket, "Prefix": prefix}
        while True:
            page = _retried(self.uri, lambda: self._client.list_objects_v2(**asked))
            for item in page.get("Contents", ()):
                yield item["Key"][len(prefix) :], Entry(item["Size"], item["ETag"])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]


def storage_path(where: StoragePath | Path | str, options: StorageOptions = StorageOptions()) -> StoragePath:
    """A StoragePath from what people write: a path (made absolute) or an s3:// URI."""
    if isinstance(where, StoragePath):
        return where
    if is_remote(str(where)):
        return StoragePath(str(where).rstrip("/"), options)
    return StoragePath(str(Path(where).expanduser().absolute()), options)


def is_remote(uri: str) -> bool:
    return uri.startswith(REMOTE)


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// URI."""
    bucket, _, key = uri.removeprefix(REMOTE).partition("/")
    return bucket, key


def _content_tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _write_local_if(path: Path, data: bytes, tag: str | None) -> str:
    """Compares and replaces under a lock beside the file, which falls with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = _content_tag(path.read_bytes()) if path.exists() else None
        if now != tag:
            raise ConflictError(f"{path} was written by somebody else")
        write_bytes(path, data)
    return _content_tag(data)


@lru_cache(maxsize=8)
def _client(options: StorageOptions, pid: int) -> Any:
    """One client a process (a fork may not share its sockets); threads share it."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=32,
        retries={"total_max_attempts": 1},  # ours cover broken bodies too, and are counted in one place
    )
    return boto3.session.Session().client(
        "s3", endpoint_url=options.endpoint_url, region_name=options.region, config=config
    )


def _retried(uri: str, call: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """The call's result; failures that may pass are tried again after a random pause that grows (full jitter)."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
    from botocore.exceptions import HTTPClientError as BrokenConnection
    from urllib3.exceptions import HTTPError

    for attempt in range(attempts):
        try:
            return call()
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "")
            if status == 404:
                what = "bucket" if code == "NoSuchBucket" else "object"
                raise FileNotFoundError(2, f"no such {what}", uri) from error
            passing = status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout", "Throttling")
            failure: Exception = error
        except (NoCredentialsError, ParamValidationError) as error:
            raise StorageError(f"{uri}: {error}") from error
        except (BrokenConnection, BotoCoreError, HTTPError, ConnectionError) as error:
            passing, failure = True, error
        if not passing or attempt == attempts - 1:
            tries = f" after {attempt + 1} attempts" if attempt else ""
            raise StorageError(f"{uri}: storage failed{tries}: {' '.join(str(failure).split())}") from failure
        time.sleep(random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)))
    raise AssertionError("unreachable")


def try_rights(folder: StoragePath) -> None:
    """Writes a small file only if it is not there, is refused a second time, reads, lists and removes it.

    Raises StorageError with what cannot be done. A storage that takes the second write keeps no promise to two
    writers at once, which is what leases rest on.
    """
    probe = folder / f".raycap-probe-{uuid.uuid4().hex}"
    text, is_new = probe.name.encode(), not folder.is_remote and not folder.path.exists()
    try:
        if not _is_written(probe, text):
            raise StorageError(f"{folder}: a file with a new name is said to be there already")
        try:
            if _is_written(probe, b"second"):
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


def _is_written(probe: StoragePath, data: bytes) -> bool:
    """Whether a file that must not be there yet takes `data`; tried once, for a person waits for the answer."""
    try:
        probe.write_if(data, None, attempts=1)
    except ConflictError:
        return False
    return True
