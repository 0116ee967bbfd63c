"""The heads of requests at the proxy: large and slow ones end their connection, and all others are served."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from uvicorn.protocols.http import auto

from raycap.jobs.serve import proxy

HEAD = b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def count_bytes(scope: dict[str, object], receive: object, send: object) -> None:
    """Answers with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()  # type: ignore[operator]
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": body})  # type: ignore[operator]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # restored afterwards
    assert proxy.limit_heads() == []
    server = uvicorn.Server(uvicorn.Config(count_bytes, lifespan="off", log_config=None))  # type: ignore[arg-type]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def answer_to(connection: socket.socket, data: bytes) -> bytes:
    """What the server sends until it closes the connection, or has answered."""
    try:
        connection.sendall(data)
        return connection.recv(1000)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x: " + b"y" * 10**6,
        HEAD + b"x: y\r\n" * 10**5,
        b"GET /" + b"x" * 10**6,
        b"\r\n" * 10**6,
        CHUNKED + b"1;" + b"x" * 10**6,
        CHUNKED + b"0\r\nx: " + b"y" * 10**6,
    ],
)
def test_a_large_head_ends_the_connection(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, timeout=60) as connection:
        answer = answer_to(connection, data)
    assert answer == b"" or b"400 Bad Request" in answer


def test_large_bodies_and_further_requests_are_served(address: tuple[str, int]) -> None:
    size = 5 * 10**6
    with socket.create_connection(address, timeout=60) as connection:
        for _ in range(3):
            answer = answer_to(connection, HEAD + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"%d" % size)
            answer = answer_to(connection, CHUNKED + b"2710\r\n" + bytes(10_000) + b"\r\n0\r\n\r\n")
            assert answer.endswith(b"10000")


def test_a_head_must_arrive_in_time(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_HEAD_S", 0.5)
    with (
        socket.create_connection(address, timeout=60) as silent,
        socket.create_connection(address, timeout=60) as slow,
        socket.create_connection(address, timeout=60) as patient,
    ):
        patient.sendall(HEAD + b"Content-Length: 3\r\n\r\na")  # a body may take longer, which the ingress limits
        slow.sendall(HEAD)
        assert silent.recv(1000) == slow.recv(1000) == b""
        time.sleep(0.2)
        assert answer_to(patient, b"bc").endswith(b"3")
        patient.sendall(HEAD)  # of a second request
        assert patient.recv(1000) == b""
