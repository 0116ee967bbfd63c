"""Limits the heads of requests in Ray Serve's proxy, whose server (uvicorn with httptools) reads them without end.

One client that sends a header of 100 MiB keeps the proxy busy for so long that Ray ends it. Ray calls `limit_heads` in
the proxy's process if RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
MAX_HEAD_S = 30.0


def limit_heads() -> list[Any]:
    """Lets servers that this process starts from now on use `LimitedHeads`. Returns middlewares, as Ray asks: none."""
    auto.AutoHTTPProtocol = LimitedHeads
    return []


class LimitedHeads(HttpToolsProtocol):
    """A connection that ends if a head does not arrive in time, or too many bytes come that are no body.

    Such bytes are those of heads, of trailers, and of extensions of chunks.
    """

    has_progressed = False  # since the last bytes came: with a head, a part of a body, or the end of a request
    num_pending = 0  # bytes since then
    timer: asyncio.TimerHandle | None = None  # while a head is awaited

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.has_progressed = False
        super().data_received(data)
        self.num_pending = 0 if self.has_progressed else self.num_pending + len(data)
        if self.num_pending > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.has_progressed = True
        self._head_is_here()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.has_progressed = True
        super().on_message_complete()

    def _await_head(self) -> None:
        if self.timer is None:
            self.timer = self.loop.call_later(MAX_HEAD_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
