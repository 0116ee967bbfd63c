"""The outermost layer of a server: who may ask, how many at a time, and what is counted and said of failures.

It is an ASGI application around another one, and uses no framework.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from raycap.pipeline.runtime.names import one_line
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.serving.limits import Limits, RefusedError
from raycap.pipeline.serving.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/healthz")  # without a token: the page contains nothing of the server
COUNTED_PATHS = ("/", "/healthz", "/caption", "/explain", "/models", "/metrics", "/openapi.json")
QUEUED_PATHS = ("/caption", "/explain")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FAILED = "the server failed; its log has the reason"
HEADERS = {
    b"cache-control": b"no-store",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """Who may ask. token: that requests must have; None for any client. loopback_only: refuse other names of the host.

    Without a token, a page from elsewhere could make a browser on this machine send requests. Therefore requests with
    another origin are refused, and a server on the loopback interface answers only to its names there.
    """

    token: str | None = None
    loopback_only: bool = True


class Guard:
    """Checks requests, counts them, and turns every failure into one sentence of JSON."""

    def __init__(self, app: App, access: Access, limits: Limits, metrics: Metrics) -> None:
        self.app, self.access, self.limits, self.metrics = app, access, limits, metrics
        self._in_progress = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in COUNTED_PATHS else "other"
        begin, status = time.monotonic(), 499  # of a client that has gone

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS.items()]
            await send(message)

        try:
            await self._answer(scope, receive, send_counted)
        finally:
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - begin)

    async def _other(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes the start and end of the server on, and refuses web sockets."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """The answer of the application, or the sentence of a refusal or failure."""
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        is_queued = scope["path"] in QUEUED_PATHS
        try:
            self._check(scope)
            if is_queued and self._in_progress >= self.limits.queue:
                is_queued = False
                raise RefusedError(429, f"the server works on {self.limits.queue} requests; try again later", 1)
            self._in_progress += is_queued
            self.metrics.in_progress.set(self._in_progress)
            await self.app(scope, receive, send_noted)
        except RefusedError as error:
            if not has_begun:
                await _send_error(send, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if type(error).__name__ == "ClientDisconnect":
                return
            logger.exception(f"a request to {scope['path']!r} failed: {without_secrets(one_line(error))}")
            if not has_begun:
                await _send_error(send, RefusedError(500, FAILED))
        finally:
            self._in_progress -= is_queued
            self.metrics.in_progress.set(self._in_progress)

    def _check(self, scope: Message) -> None:
        """Raises RefusedError for a request without the token, from another origin, or to another host."""
        headers = {key.lower(): value for key, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1")
        if self.access.loopback_only and self.access.token is None and _without_port(host) not in LOOPBACK:
            raise RefusedError(403, "this server answers only to localhost; start it with a token to allow other names")
        origin = headers.get(b"origin")
        if origin is not None and self.access.token is None and _host_of(origin) != host:
            raise RefusedError(403, "requests of pages from elsewhere are refused")
        if self.access.token is None or scope["path"] in OPEN_PATHS:
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        # compared as a whole, in a time that does not depend on where the texts differ
        if not (kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.access.token.encode())):
            raise RefusedError(401, "the header Authorization needs Bearer and the server's token")


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() else host


def _host_of(origin: bytes) -> str:
    """Host and port of an origin; "" for one that is none."""
    try:
        return urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return ""


def error_parts(error: RefusedError) -> tuple[bytes, dict[str, str]]:
    """The body of the answer to a refused request, its sentence as JSON, and the headers."""
    headers = {"content-type": "application/json"}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return json.dumps({"error": str(error)}).encode(), headers


async def _send_error(send: Send, error: RefusedError) -> None:
    body, headers = error_parts(error)
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    encoded.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
