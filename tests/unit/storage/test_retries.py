"""Failed requests to S3 are repeated for minutes. botocore's client runs on a clock of the test, without a network."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import EndpointConnectionError

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.preflight import check_storage
from raycap.pipeline.storage import s3
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from tests.conftest import small_config
from tests.support.s3_server import CREDENTIALS

URL = "http://127.0.0.1:9"
OUTAGE_S = 300.0


class Server:
    """Answers each request in place of the network. respond: gives the status and the error code of an answer.

    seconds: the clock, which pauses between requests set forward at once.
    """

    def __init__(self) -> None:
        self.seconds, self.num_requests = 0.0, 0
        self.respond: Callable[[], tuple[int, str]] = lambda: (200, "")

    def send(self, request: Any, **_: Any) -> AWSResponse:
        self.num_requests += 1
        status, code = self.respond()
        body = f"<Error><Code>{code}</Code></Error>" if code else "<ListBucketResult/>"
        raw = io.BytesIO(body.encode())
        raw.stream = lambda *_, **__: iter([raw.read()])  # type: ignore[attr-defined]
        return AWSResponse(request.url, status, {"ETag": '"tag"'}, raw)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def refuses(self, status: int, code: str, *, until: float) -> None:
        self.respond = lambda: (status, code) if self.seconds < until else (200, "")

    def is_absent(self) -> None:
        def refuse_connection() -> tuple[int, str]:
            raise EndpointConnectionError(endpoint_url=URL)

        self.respond = refuse_connection


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    clock = SimpleNamespace(monotonic=lambda: server.seconds, sleep=server.sleep, time=lambda: server.seconds)
    for module in ("raycap.pipeline.storage.s3", "botocore.endpoint"):
        monkeypatch.setattr(f"{module}.time", clock)
    s3._client.cache_clear()
    for options in (StorageOptions(URL), StorageOptions(URL).hasty):
        s3._client(options, os.getpid()).meta.events.register("before-send.s3", server.send)
    yield server
    s3._client.cache_clear()


def put() -> None:
    StoragePath("s3://data/x", StorageOptions(URL)).write_bytes(b"content")


def test_an_outage_of_minutes_is_survived_and_logged(
    server: Server, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.retryhandler.random", SimpleNamespace(random=lambda: 0.5))
    server.refuses(503, "SlowDown", until=OUTAGE_S)
    put()
    assert OUTAGE_S <= server.seconds < 2 * OUTAGE_S
    assert log_lines[0] == f"S3: PutObject {URL}/data/x has failed 6 times (503)" and 2 < len(log_lines) < 7


def test_an_outage_without_an_end_is_an_error_after_the_configured_time(server: Server) -> None:
    server.is_absent()
    with pytest.raises(StorageError, match=f"s3://data/x: storage failed in every attempt: .*{URL}"):
        put()
    assert server.num_requests == 11 and server.seconds > 60


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchBucket"), (404, "NoSuchKey")])
def test_a_refusal_is_not_repeated(server: Server, status: int, code: str, log_lines: list[str]) -> None:
    server.respond = lambda: (status, code)
    with pytest.raises(OSError, match="s3://data/x"):
        put()
    assert server.num_requests == 1 and not log_lines


def test_a_wrong_address_or_bucket_is_found_at_once(server: Server, tmp_path: Path) -> None:
    storage = small_config({"uri": "s3://data/runs", "endpoint_url": URL})
    data = small_config({"uri": str(tmp_path), "endpoint_url": URL})
    data["data"] = {"root": "s3://data/set", "train_splits": ["train"]}
    for config in map(parse_config, (storage, data)):
        server.is_absent()
        begin = server.seconds
        with pytest.raises(UserError, match="storage failed in every attempt"):
            check_storage(config)
        assert server.seconds < begin + 16
        server.respond = lambda: (404, "NoSuchBucket")
        with pytest.raises(UserError, match="no such bucket"):
            check_storage(config)
        server.refuses(503, "SlowDown", until=server.seconds + OUTAGE_S)
        check_storage(config)  # a server that has too much to do is the right one
