"""The jobs server's token reaches the server that was named and no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ray.util.state.common import RAY_MAX_LIMIT_FROM_API_SERVER

from raycap.pipeline.cluster.jobs_api import JobsServer
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.secrets import forget_all, without_secrets

TOKEN = "marked-token-8c1d"


class Handler(BaseHTTPRequestHandler):
    """Asks for a token. With it, answers, or redirects to `server.location`."""

    def do_GET(self) -> None:
        server: Any = self.server
        token = self.headers.get("Authorization")
        server.seen.append((self.path, token))
        body = b'{"ray_version": "1"}'
        if token is None:
            self.send_response(401)
        elif server.location and not self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", server.location)
            body = b""
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def http_server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.location = [], ""
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with http_server() as server:
        yield server


def test_a_redirect_to_another_server_is_not_followed(head: Any) -> None:
    with http_server() as other:
        head.location = f"{other.address}/api/version"
        with pytest.raises(UserError, match=f"redirects to {other.address}, which would receive the token"):
            JobsServer(head.address).version()
        assert not other.seen
    assert head.seen[-1][1] == f"Bearer {TOKEN}"


def test_a_redirect_within_the_server_is_followed(head: Any) -> None:
    head.location = "/moved/version"
    assert JobsServer(head.address).version() == {"ray_version": "1"}
    assert head.seen[-1] == ("/moved/version", f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("old", "new", "followed"),
    [
        ("http://head:8265/a", "https://head/a", True),
        ("https://head/a", "http://head/a", False),
        ("https://head/a", "https://head:444/a", False),
        ("https://head/a", "https://head.evil/a", False),
        ("https://head/a", "https://head@evil/a", False),
    ],
)
def test_which_redirects_are_followed(old: str, new: str, followed: bool) -> None:
    import urllib.request

    (handler,) = [
        each
        for each in JobsServer("http://head")._opener.handlers
        if isinstance(each, urllib.request.HTTPRedirectHandler)
    ]
    request = urllib.request.Request(old, headers={"Authorization": TOKEN})
    if followed:
        assert handler.redirect_request(request, None, 302, "", {}, new) is not None
    else:
        with pytest.raises(UserError, match="redirects to"):
            handler.redirect_request(request, None, 302, "", {}, new)


def test_the_warning_precedes_the_token(head: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = JobsServer(head.address)
    server.is_unencrypted = True  # as if the head were another machine
    warnings: list[list[Any]] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(list(head.seen))

    note = Note()
    logging.getLogger("raycap.pipeline.cluster.jobs_api").addHandler(note)
    try:
        server.version()
    finally:
        logging.getLogger("raycap.pipeline.cluster.jobs_api").removeHandler(note)
    assert warnings == [[("/api/version", None)]] and head.seen[-1][1] == f"Bearer {TOKEN}"
    assert "the token is sent over http" in caplog.text


def test_a_tunnel_needs_no_proxy(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would get the token of a cluster whose port a tunnel brings to this machine."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "ray_version" in JobsServer(head.address).version()


def test_a_variable_that_holds_the_token_in_place_of_its_file_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all()  # what is remembered of the environment
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "marked-token")
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH = .* cannot be read") as refused:
        JobsServer("http://127.0.0.1:9")
    assert "marked" not in without_secrets(str(refused.value))


@pytest.mark.parametrize("address", ["http://me:word@head:8265", "http://ghp_x@head:8265"])
def test_an_address_with_a_user_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="contains a user or password"):
        JobsServer(address)


@pytest.mark.parametrize(
    "address",
    ["ftp://h", "http://", "http://[::1", "http://a..b:1", f"http://{'a' * 300}", "http://h:abc", "http://h:1/\xf6",
     "http://h:99999", "http://h\0", "http://h:1/\r\nX: y"],
)  # fmt: skip
def test_a_text_that_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="is not a dashboard's address") as refused:
        JobsServer(address)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("host", "is_this_machine"),
    [("127.8.9.1", True), ("[::1]", True), ("localhost", True),
     ("127.0.0.1.evil.com", False), ("localhost.evil.com", False), ("10.0.0.1", False), ("b\xfccher.de", False)],
)  # fmt: skip
def test_only_this_machine_may_get_a_token_over_http(host: str, is_this_machine: bool) -> None:
    assert JobsServer(f"http://{host}:8265").is_unencrypted != is_this_machine


@pytest.mark.parametrize("token", ["marked\ntoken", "marked token", "marked-t\u00f6ken"])
def test_a_token_that_cannot_be_sent_is_refused_without_its_text(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(UserError, match="the token from RAY_AUTH_TOKEN must be one line") as refused:
        JobsServer("http://127.0.0.1:9")
    assert "marked" not in str(refused.value)


def test_a_token_file_of_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"marked\xff")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UserError, match="the token from .*/token must be one line"):
        JobsServer("http://127.0.0.1:9")


def test_all_nodes_of_a_large_cluster_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(_: Any, method: str, path: str) -> dict[str, Any]:
        limit = int(path.rpartition("limit=")[2])
        assert limit <= RAY_MAX_LIMIT_FROM_API_SERVER, "Ray refuses it"
        return {"data": {"result": {"result": [{"state": "ALIVE"}] * min(limit, 2500)}}}

    monkeypatch.setattr(JobsServer, "_request", request)
    assert len(JobsServer("http://127.0.0.1:1").nodes()) == 2500
