"""An S3 server for tests (moto's) that can answer some or all requests with 503, late, or with a cut connection.

python -m tests.support.s3_server SHARE    SHARE of all requests fail; prints its URL and serves until it is killed
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LATE_S = 0.3  # the longest delay of an answer
ROOT = Path(__file__).resolve().parents[2]
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


OUTAGE, READS = "/.outage", "/.reads"  # the paths of `plan_outage` and `reads`


class BadDay:
    """A WSGI application around another, which refuses or delays a share of requests, or cuts their answers.

    During an outage, all requests are refused. planned: for each of the next outages, its seconds and a text. It begins
    with the first request whose path has this text. delay_s: of each answer. read: the path and query of each GET
    request.
    """

    def __init__(self, application: Any, share: float, delay_s: float) -> None:
        self.application, self.share, self.random = application, share, random.Random(7)
        self.delay_s = delay_s
        self.planned: list[tuple[float, str]] = []
        self.outage_until = 0.0
        self.read: list[str] = []
        self.conditional = threading.Lock()  # S3 compares and writes atomically; moto does not

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys():
            size = int(environ.get("CONTENT_LENGTH") or 0)
            # before the lock is taken, because a client may stop in the middle
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size))
            with self.conditional:
                return self._answer(environ, start_response)
        return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == OUTAGE:
            query = urllib.parse.parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
            self.planned.append((float(query["seconds"][0]), query["at"][0]))
            start_response("200 OK", [])
            return []
        if environ["PATH_INFO"] == READS:
            start_response("200 OK", [("Content-Type", "text/plain")])
            return ["\n".join(self.read).encode()]
        if environ["REQUEST_METHOD"] == "GET":
            self.read.append(f"{environ['PATH_INFO']}?{urllib.parse.unquote(environ['QUERY_STRING'])}")
        time.sleep(self.delay_s)
        if self.planned and self.planned[0][1] in environ["PATH_INFO"]:
            self.outage_until = time.monotonic() + self.planned.pop(0)[0]
        number = self.random.random()
        is_outage = time.monotonic() < self.outage_until
        if number < self.share / 3 and not is_outage:
            time.sleep(self.random.uniform(0.1, LATE_S))
        elif number < self.share * 2 / 3 or is_outage:
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        elif number < self.share:
            return self._cut(b"".join(self.application(environ, start_response)))
        return self.application(environ, start_response)

    def _cut(self, body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionResetError("cut")


def serve(share: float, delay_s: float) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    application = BadDay(DomainDispatcherApplication(create_backend_app), share, delay_s)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


def plan_outage(url: str, seconds: float, at: str = "") -> None:
    """The server at `url` will refuse all requests with 503 for `seconds`.

    This begins with the first request, after earlier outages, whose path contains `at`.
    """
    with urllib.request.urlopen(f"{url}{OUTAGE}?{urllib.parse.urlencode({'seconds': seconds, 'at': at})}"):
        pass


def reads(url: str) -> list[str]:
    """The path and query, with a question mark between them, of each GET request so far."""
    with urllib.request.urlopen(f"{url}{READS}") as answer:
        return answer.read().decode().splitlines()


@contextmanager
def s3_server(share: float = 0.0, delay_s: float = 0.0) -> Iterator[str]:
    """The URL of a new server with the bucket `data`.

    share: fraction of the requests that fail or are late. delay_s: the delay of each answer, as of a distant region.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3_server", str(share), str(delay_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "moto's server did not start"
        import boto3

        for _ in range(20):
            try:
                boto3.client("s3", endpoint_url=url).create_bucket(Bucket="data")
                break
            except Exception:
                continue
        yield url
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(*map(float, sys.argv[1:]))
