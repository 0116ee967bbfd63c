"""An HTTP server in place of a cluster's dashboard or a tracker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    """An HTTP server that answers GET by path: (status, body); its address is under `address`."""
    found: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.setdefault("tokens", []).append(self.headers.get("Authorization"))
            status, body = found.get(self.path.split("?")[0], (404, ""))
            if isinstance(body, dict) and body.get("token") not in (None, self.headers.get("Authorization")):
                status, body = 401 if self.headers.get("Authorization") is None else 403, "no"
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found["address"] = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join(10)
