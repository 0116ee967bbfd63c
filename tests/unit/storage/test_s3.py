"""What S3 objects add to boto3: repeated reads of cut bodies, conditional writes, and errors that name the URI."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.response import StreamingBody
from s3transfer.exceptions import S3DownloadFailedError

from raycap.pipeline.storage.s3 import (
    ATTEMPTS,
    PART_BYTES,
    ConflictError,
    Entry,
    S3Object,
    StorageError,
    StorageOptions,
)


def refusal(status: int, code: str = "") -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "RetryAttempts": 0}}
    return ClientError(answer, "PutObject")


class Client:
    """Gives the prepared answers one after another. An answer that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def put_object(self, **_: Any) -> Any:
        return self._next()

    def get_object(self, **_: Any) -> Any:
        return self._next()

    def head_object(self, **_: Any) -> Any:
        return self._next()

    def download_file(self, **_: Any) -> Any:
        return self._next()

    def _next(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def body(data: bytes, length: int) -> dict[str, Any]:
    return {"Body": StreamingBody(io.BytesIO(data), length), "ETag": '"tag"'}  # type: ignore[arg-type]


@pytest.fixture
def s3_object(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object whose client gives these answers."""

    def make(*answers: Any) -> tuple[S3Object, Client]:
        client = Client(*answers)
        monkeypatch.setattr("raycap.pipeline.storage.s3.time", SimpleNamespace(sleep=lambda _: None))
        monkeypatch.setattr("raycap.pipeline.storage.s3._client", lambda options, pid: client)
        return S3Object("s3://data/x", StorageOptions()), client

    return make


def test_a_cut_body_is_read_again(s3_object: Any) -> None:
    where, _ = s3_object(body(b"ab", 4), body(b"abcd", 4))
    assert where.get() == (b"abcd", '"tag"')
    where, client = s3_object(*[body(b"ab", 4)] * ATTEMPTS, body(b"abcd", 4))
    with pytest.raises(StorageError, match="s3://data/x: storage failed"):
        where.get()
    assert len(client.answers) == 1


def test_a_large_object_that_changes_is_downloaded_again(s3_object: Any, tmp_path: Path) -> None:
    size, replaced = 3 * PART_BYTES, S3DownloadFailedError("did not match expected ETag")
    old, new = ({"ContentLength": size, "ETag": tag} for tag in ("old", "new"))
    where, client = s3_object(old, replaced, old, None, new, new, None, new)  # during and before the transfer
    assert where.download(tmp_path / "x") == Entry(size, "new") and not client.answers
    where, _ = s3_object(*[old, replaced] * ATTEMPTS)
    with pytest.raises(StorageError, match="s3://data/x: .* replaced"):
        where.download(tmp_path / "x")


def test_a_conditional_write_waits_for_another_one_under_way(s3_object: Any) -> None:
    where, _ = s3_object(refusal(409), refusal(409), {"ETag": "new"})
    assert where.put_if(b"one", None) == "new"
    where, _ = s3_object(*[refusal(409)] * ATTEMPTS)
    with pytest.raises(StorageError, match="s3://data/x: storage failed"):
        where.put_if(b"one", None)


def test_a_write_whose_answer_was_lost_is_recognized_by_its_content(s3_object: Any) -> None:
    where, _ = s3_object(refusal(412), body(b"one", 3))
    assert where.put_if(b"one", None) == '"tag"'
    for current in (body(b"two", 3), refusal(404)):
        where, _ = s3_object(refusal(412), current)
        with pytest.raises(ConflictError, match="s3://data/x was written by another process"):
            where.put_if(b"one", "tag of old")


def test_refusals_are_errors_that_name_the_uri(s3_object: Any) -> None:
    for error, kind, message in (
        (refusal(403, "AccessDenied"), StorageError, "s3://data/x: storage failed: .*AccessDenied"),
        (refusal(403, "InvalidObjectState"), PermissionError, "archived and must be restored first: 's3://data/x'"),
        (refusal(404, "NoSuchBucket"), FileNotFoundError, "no such bucket: 's3://data/x'"),
        (refusal(404, "NoSuchKey"), FileNotFoundError, "no such object: 's3://data/x'"),
        (NoCredentialsError(), StorageError, "s3://data/x: storage failed: .*credentials"),
    ):
        where, _ = s3_object(error)
        with pytest.raises(kind, match=message):
            where.get()
