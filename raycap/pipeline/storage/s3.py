"""Reads, writes and lists objects on S3. No other module imports boto3.

botocore repeats requests that fail (its mode "legacy", with more attempts), and boto3's transfer manager moves large
objects in parts. This module also repeats reads whose body was cut. If the answer to a conditional write was lost, it
compares the stored content to see whether the write succeeded.
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

LOGGED_AFTER = 5  # a request that fails more often is logged, after about 15 s
REMOTE = "s3://"
PART_BYTES = 32 * 2**20  # objects of more than two parts are transferred in parts
PARTS_AT_A_TIME = 4
RETRY_MINUTES = 10.0  # long, because S3 may refuse requests for minutes while it splits a prefix
PROBE_MINUTES = 1 / 6  # for requests whose result a person waits for
ATTEMPTS = 10  # of a read whose body was cut, or of a transfer while another process writes
PAUSE_S = 0.5  # the longest pause between two of these attempts


class StorageError(OSError):
    """A request that storage refused, or that failed in every attempt. The message names the URI."""


class ConflictError(OSError):
    """A conditional write that was refused, because another process has written the file."""


class Entry(NamedTuple):
    """The size of a file, a tag that changes with its content, and its modification time."""

    size: int  # in bytes
    tag: str  # on disk the modification time in ns, on S3 the ETag
    modified: float = 0.0  # Unix seconds, or 0 if unknown, as on S3 outside of listings


@dataclass(frozen=True)
class StorageOptions:
    """The server and region of S3, and the limit of retries."""

    endpoint_url: str | None = None  # by default from the usual AWS sources (environment, profile, instance role)
    region: str | None = None  # by default from the same sources
    retry_minutes: float = RETRY_MINUTES  # how long a failing request is repeated

    @property
    def hasty(self) -> StorageOptions:
        """The same options with few retries, for requests whose result a person waits for."""
        return replace(self, retry_minutes=min(PROBE_MINUTES, self.retry_minutes))


@dataclass(frozen=True)
class S3Object:
    """An object, or all objects below a prefix.

    Methods raise FileNotFoundError if the object or the bucket does not exist, and StorageError for other failures.
    """

    uri: str
    options: StorageOptions

    def require_answer(self) -> None:
        """Raises an error if no server answers or the bucket does not exist. A refusal counts as an answer."""
        from botocore.exceptions import ClientError

        bucket, key = self._location.values()
        try:
            with self._errors_translated():
                self._client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
        except StorageError as error:
            has_answered = isinstance(error.__cause__, ClientError)
            if not has_answered:
                raise

    def get(self, max_bytes: int | None = None, **extra: str) -> tuple[bytes, str]:
        """Returns the content and the tag. extra: more parameters of GetObject, such as Range.

        Raises OSError, without reading the content, if the content has more than `max_bytes` bytes.
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
        """Replaces the object if it has this tag, and returns the new tag. If the tag is None, no object may exist.

        Raises ConflictError if another writer was faster. `data` must be unique, for example by a nonce. If the answer
        to a successful write is lost, the repeated write is refused, so only the stored content shows the success.
        """
        from botocore.exceptions import ClientError

        if tag is None:
            condition, refusals = {"IfNoneMatch": "*"}, [HTTPStatus.PRECONDITION_FAILED]
        else:  # the object may have been replaced or removed
            condition, refusals = {"IfMatch": tag}, [HTTPStatus.PRECONDITION_FAILED, HTTPStatus.NOT_FOUND]
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
        """Uploads a file of `size` bytes, in parts if it is large. Returns the object's new tag."""
        with self._errors_translated():
            if size <= 2 * PART_BYTES:
                # The file is read only once, because a writer may extend it between the checksum and the transfer.
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
            # S3DownloadFailedError: the object was replaced between two parts, so it is downloaded again
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
        """Yields the relative name and the entry of every object below this prefix."""
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
        """The settings of boto3's transfer manager for large objects.

        The transfer client is "classic", because the "crt" client ignores these settings.
        """
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
        """Raises StorageError in place of boto3's errors, except for errors of the object itself.

        A missing object or bucket raises FileNotFoundError, an archived object PermissionError, and a range beyond the
        object's end OSError.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        try:
            yield
        except ClientError as error:
            code = error.response["Error"].get("Code")
            if code == "InvalidObjectState":  # this object is at fault, not the storage
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
        attempts = " in every attempt" if is_repeated else ""
        return StorageError(f"{self.uri}: storage failed{attempts}: {' '.join(str(error).split())}")


def _attempts() -> Iterator[bool]:
    """Yields False for each attempt and True for the last, ATTEMPTS values in all. Pauses between two attempts."""
    for number in range(1, ATTEMPTS + 1):
        yield number == ATTEMPTS
        time.sleep(random.uniform(0, PAUSE_S))


def is_remote(uri: str) -> bool:
    return uri.startswith(REMOTE)


def _status(error: Any) -> int:
    """The HTTP status in a botocore ClientError, or 0 if it has none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@lru_cache(maxsize=8)
def _client(options: StorageOptions, pid: int) -> Any:
    """The boto3 client for these options, shared by all threads of a process.

    pid: the process. A forked process thus creates its own client, because a fork must not use its parent's sockets.
    """
    import boto3
    from botocore.config import Config

    # Pauses are random, up to 1 s, then 2 s, then 4 s, so that this many attempts take about `retry_minutes`.
    attempts = 1 + int(math.log2(1 + 120 * options.retry_minutes))
    config = Config(
        connect_timeout=5,
        read_timeout=30,
        max_pool_connections=32,
        # The mode is "legacy", because in the modes "standard" and "adaptive" all threads share a quota of 35 to 100
        # repeats, which an outage uses up within seconds.
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
    """Logs a request that has failed more than LOGGED_AFTER times. botocore calls this function after each attempt."""
    status = 0 if response is None else response[0].status_code
    if attempts > LOGGED_AFTER and (caught_exception or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
        reason = " ".join(str(caught_exception or status).split())
        logger.warning(f"S3: {operation.name} {request_dict['url']} has failed {attempts} times ({reason})")
