"""Objects on S3. No other module imports boto3.

botocore repeats requests that fail (its mode "legacy", with more attempts), and boto3's transfer manager moves large
objects in parts. This module also repeats reads whose body was cut, and recognizes a successful conditional write whose
answer was lost.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

logger = logging.getLogger(__name__)

LOGGED_AFTER = 5  # failures of a request, which take about 15 s
REMOTE = "s3://"
PART_BYTES = 32 * 2**20  # objects of more than two parts are transferred in parts
PARTS_AT_A_TIME = 4
RETRY_MINUTES = 10.0  # the default: S3 may refuse requests for minutes while it splits a prefix
PROBE_MINUTES = 1 / 6  # for requests whose result a person waits for
ATTEMPTS = 10  # of a read whose body was cut, or of a transfer that met another writer
PAUSE_S = 0.5  # the longest pause between two of these attempts


class StorageError(OSError):
    """A request that storage refused, or that failed in every attempt. The message names the URI."""


class OutageError(StorageError):
    """A request that failed in every attempt, so that the storage and not the one object is at fault."""


class ConflictError(OSError):
    """A conditional write that came too late: another writer has replaced the file."""


class Entry(NamedTuple):
    """The size of a file, and a tag that changes with its content."""

    size: int  # in bytes
    tag: str  # modification time in ns, or the ETag
    modified: float = 0.0  # Unix seconds; on S3 only listings have it


@dataclass(frozen=True)
class StorageOptions:
    """How S3 is reached."""

    endpoint_url: str | None = None  # by default from the usual AWS sources (environment, profile, instance role)
    region: str | None = None  # by default from the same sources
    retry_minutes: float = RETRY_MINUTES  # how long a request that fails is repeated

    @property
    def hasty(self) -> StorageOptions:
        """The same storage for requests whose result a person waits for."""
        return replace(self, retry_minutes=min(PROBE_MINUTES, self.retry_minutes))


@dataclass(frozen=True)
class S3Object:
    """An object, or all objects below a prefix.

    Methods raise FileNotFoundError if the object or the bucket does not exist, and StorageError for other failures.
    """

    uri: str
    options: StorageOptions

    def require_answer(self) -> None:
        """Raises an error if no server answers or the bucket does not exist."""
        from botocore.exceptions import ClientError

        bucket, key = self._location.values()
        try:
            with self._errors_translated():
                self._client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
        except StorageError as error:
            has_answered = isinstance(error.__cause__, ClientError)  # a refusal is an answer, too
            if not has_answered:
                raise

    def get(self, max_bytes: int | None = None, **extra: str) -> tuple[bytes, str]:
        """Returns the content and the tag. extra: more parameters of GetObject, such as Range.

        Raises OSError before it reads the content if that has more than `max_bytes` bytes.
        """
        from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

        with self._errors_translated():
            for is_last in _attempts():
                response = self._client.get_object(**self._location, **extra)
                if max_bytes is not None and response["ContentLength"] > max_bytes:
                    response["Body"].close()
                    raise OSError(errno.EMSGSIZE, f"larger than {max_bytes} bytes", self.uri)
                try:
                    return response["Body"].read(), str(response["ETag"])
                except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
                    if is_last:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def put_if(self, data: bytes, tag: str | None) -> str:
        """Replaces the object if it has this tag, and returns the new tag. With the tag None, no object may exist.

        Raises ConflictError if another writer was faster. `data` must be unique, for example by a nonce. If the answer
        to a successful write is lost, the repeated write is refused, and only the content shows that it was successful.
        """
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        # the object was replaced or, where it must exist, removed
        refusals = {HTTPStatus.PRECONDITION_FAILED} | ({HTTPStatus.NOT_FOUND} if tag is not None else set())
        with self._errors_translated():
            for is_last in _attempts():
                try:
                    return str(self._client.put_object(**self._location, Body=data, **condition)["ETag"])
                except ClientError as error:
                    if _status(error) in refusals:
                        break
                    is_busy = _status(error) == HTTPStatus.CONFLICT  # another conditional write is under way
                    if is_last or not is_busy:
                        raise
        with suppress(FileNotFoundError):
            content, new_tag = self.get()
            if content == data:
                return new_tag
        raise ConflictError(f"{self.uri} was written by another process")

    def put(self, file: BinaryIO, size: int) -> str:
        """Replaces the object by a file of `size` bytes, a large file in parts. Returns the object's tag."""
        with self._errors_translated():
            if size <= 2 * PART_BYTES:
                # The content is sent, because a writer may extend the file between the checksum and the transfer.
                return str(self._client.put_object(**self._location, Body=file.read())["ETag"])
            self._client.upload_fileobj(file, *self._location.values(), Config=self._transfer_config)
        return self.head().tag

    def download(self, path: Path) -> Entry:
        """Writes one version of the object to a local file. Returns the version's size and tag.

        A large object that is replaced meanwhile is downloaded again. Raises StorageError if this happens every time.
        """
        from s3transfer.exceptions import S3DownloadFailedError

        for _ in _attempts():
            found = self.head()
            if found.size <= 2 * PART_BYTES:
                data, tag = self.get()
                path.write_bytes(data)
                return Entry(len(data), tag)
            # the error means that the object was replaced between two of its parts
            with suppress(S3DownloadFailedError), self._errors_translated():
                self._client.download_file(**self._location, Filename=str(path), Config=self._transfer_config)
                if self.head() == found:
                    return found
        raise StorageError(f"{self.uri}: storage failed: the object was replaced during {ATTEMPTS} downloads")

    def head(self) -> Entry:
        """The object's size and tag."""
        with self._errors_translated():
            answer = self._client.head_object(**self._location)
        return Entry(answer["ContentLength"], answer["ETag"])

    def list(self) -> Iterator[tuple[str, Entry]]:
        """Every object below this prefix by its relative name."""
        bucket, key = self._location.values()
        prefix = f"{key.rstrip('/')}/" if key else ""
        with self._errors_translated():
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for item in page.get("Contents", ()):
                    entry = Entry(item["Size"], item["ETag"], item["LastModified"].timestamp())
                    yield item["Key"][len(prefix) :], entry

    def delete(self) -> None:
        with self._errors_translated():
            self._client.delete_object(**self._location)

    @property
    def _client(self) -> Any:
        return _client(self.options, os.getpid())

    @property
    def _transfer_config(self) -> Any:
        """The settings of boto3's transfer manager for large objects. Its "crt" client would ignore them."""
        from boto3.s3.transfer import TransferConfig

        sizes = {"multipart_threshold": 2 * PART_BYTES, "multipart_chunksize": PART_BYTES}
        return TransferConfig(**sizes, max_concurrency=PARTS_AT_A_TIME, preferred_transfer_client="classic")

    @property
    def _location(self) -> dict[str, str]:
        """The object's bucket and key, as boto3's methods take them."""
        bucket, _, key = self.uri.removeprefix(REMOTE).partition("/")
        return {"Bucket": bucket, "Key": key}

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Raises FileNotFoundError, PermissionError (of an archived object) or StorageError for boto3's errors."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        try:
            yield
        except ClientError as error:
            code = error.response["Error"].get("Code")
            if code == "InvalidObjectState":  # only this object is at fault
                raise OSError(errno.EACCES, "the object is archived and must be restored first", self.uri) from error
            if _status(error) == HTTPStatus.NOT_FOUND:
                kind = "bucket" if code == "NoSuchBucket" else "object"
                raise FileNotFoundError(errno.ENOENT, f"no such {kind}", self.uri) from error
            if _status(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise OSError(errno.EIO, "the object ends before this range", self.uri) from error
            is_repeated = error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
            raise self._failure(error, is_repeated) from error
        except (BotoCoreError, Boto3Error) as error:
            raise self._failure(error, isinstance(error, (ConnectionError, HTTPClientError))) from error

    def _failure(self, error: Exception, is_repeated: bool) -> StorageError:
        reason = " ".join(str(error).split())
        if is_repeated:
            return OutageError(f"{self.uri}: storage failed in every attempt: {reason}")
        return StorageError(f"{self.uri}: storage failed: {reason}")


def _attempts() -> Iterator[bool]:
    """Yields ATTEMPTS times whether it is the last attempt, and pauses before each attempt but the first."""
    for number in range(1, ATTEMPTS + 1):
        yield number == ATTEMPTS
        time.sleep(random.uniform(0, PAUSE_S))


def is_remote(uri: str) -> bool:
    return uri.startswith(REMOTE)


def _status(error: Any) -> int:
    """The HTTP status in a botocore ClientError, or 0."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@lru_cache(maxsize=8)
def _client(options: StorageOptions, pid: int) -> Any:
    """The client for these options. Threads share it, but not processes, because a fork must not share its sockets."""
    import boto3
    from botocore.config import Config

    # The first pause is a random part of 1 s, the next one of 2 s, then 4 s. All pauses take about `retry_minutes`.
    attempts = 1 + int(math.log2(1 + 120 * options.retry_minutes))
    config = Config(
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=32,
        # In the modes "standard" and "adaptive", all threads share a quota of 35 to 100 repeats, which an outage uses
        # up within seconds.
        retries={"mode": "legacy", "total_max_attempts": attempts},
    )
    client = boto3.session.Session().client(
        "s3", endpoint_url=options.endpoint_url, region_name=options.region, config=config
    )
    client.meta.events.register_first("needs-retry.s3", _log_failure)
    return client


def _log_failure(
    attempts: int, operation: Any, request_dict: Any, caught_exception: Any, response: Any, **_: Any
) -> None:
    """Logs a request that has failed for some time. It is called by botocore before it decides about a repeat."""
    status = 0 if response is None else response[0].status_code
    if attempts > LOGGED_AFTER and (caught_exception or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
        reason = " ".join(str(caught_exception or status).split())
        logger.warning(f"S3: {operation.name} {request_dict['url']} has failed {attempts} times ({reason})")
