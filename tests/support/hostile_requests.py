"""Requests that mean harm, over raw sockets, because a client library would not send them."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterable
from functools import cache
from random import Random
from typing import Any

from PIL import Image

FORMATS = ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP")
ANSWER_S = 90.0  # how long an answer is waited for
JSON = "application/json"
MULTIPART = "multipart/form-data; boundary=x"
END = b"--x--\r\n"
URIS = (
    "file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "/proc/self/environ", "/dev/zero", "s3://data/secret.png",
    "http://169.254.169.254/latest/meta-data", "http://127.0.0.1:8265/", "\\\\host\\share", "a\0.png", "", "~root",
    "gopher://127.0.0.1", "/" * 4000, "\u202e/gnp.exe",
)  # fmt: skip
METHODS = ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "HEAD", "BREW", "get", "\x01")
PATHS = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/caption%00", "//caption", "/caption/../models", "/%ff",
         "/" + "a" * 60_000, "*", "http://evil.example/", "/caption?" + "a=1&" * 10_000, "/-/healthz/..")  # fmt: skip
VALUES = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-1", b"0", b"1.5", b"true", b'"x"', b"[]", b"{}", b"null", b"1e-400",
    b'"\\ud800"', b'"\\u0000"', b'"' + b"x" * 100_000 + b'"', b"340282366920938463463374607431768211456",
)  # fmt: skip
NO_IMAGES = (b"<svg/>", b"%PDF-1.7", b"PK\3\4", b"", b"\xff\xd8\xff\xe0", bytes(5000))
KEYS = ("beam_size", "num_results", "max_length", "precision", "confidence", "model", "images", "uris", "head", "x")


def request(body: bytes, kind: str, path: str = "/caption", method: str = "POST", headers: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode("latin-1") + headers + b"\r\n" + body


def part(data: bytes, disposition: bytes = b'name="images"; filename="a.png"') -> bytes:
    return b"--x\r\nContent-Disposition: form-data; " + disposition + b"\r\n\r\n" + data + b"\r\n"


def image_request(*images: bytes) -> bytes:
    return request(b"".join(map(part, images)) + END, MULTIPART)


def json_request(body: bytes, path: str = "/caption") -> bytes:
    return request(body, JSON, path)


def exchange(address: tuple[str, int], pieces: Iterable[bytes], pause_s: float = 0.0) -> str:
    """The status of the answer to what is sent piece by piece, or how the connection ended."""
    with socket.create_connection(address, timeout=ANSWER_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                if pause_s:
                    connection.settimeout(pause_s)
                    try:
                        return _status(connection.recv(4096))
                    except TimeoutError:
                        connection.settimeout(ANSWER_S)
        except OSError:
            pass  # refused before everything was sent
        try:
            return _status(connection.recv(4096))
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"


def _status(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"


@cache
def picture(kind: str, side: int = 60) -> bytes:
    """An image file with a pattern."""
    pixels = Random(0).randbytes(3 * side * side) if side < 1000 else bytes(3 * side * side)
    file = io.BytesIO()
    options: dict[str, Any] = {"compression": "tiff_deflate"} if kind == "TIFF" else {}
    Image.frombytes("RGB", (side, side), pixels).save(file, kind, **options)
    return file.getvalue()


@cache
def bomb(kind: str) -> bytes:
    """A small file that is large when decoded: 44 million pixels, and 4 billion of a GIF."""
    if kind == "GIF":
        return picture("GIF")[:6] + b"\xff\xff\xff\xff" + picture("GIF")[10:]
    return picture(kind, 6_650)


def damaged(kind: str, rng: Random) -> bytes:
    data = bytearray(picture(kind))
    if rng.random() < 0.4:
        return bytes(data[: rng.randrange(1, len(data))])
    for _ in range(rng.choice((1, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def odd_json(rng: Random) -> bytes:
    values = {key: rng.choice(VALUES) for key in rng.sample(KEYS, rng.randint(1, 4))}
    return b"{" + b", ".join(json.dumps(key).encode() + b": " + value for key, value in values.items()) + b"}"


def huge_json(rng: Random) -> bytes:
    count = 10**6
    return rng.choice(
        (
            b"[" * count,
            b'{"a":' * count,
            b'{"images": [' + b'"",' * count + b'""]}',
            b'{"images": ["' + b"A" * 6 * count + b'"]}',
            b'{"x": ' + b"9" * count + b"}",
            b'{"' + b"x" * count + b'": 1}',
            b'"' + b"\\u0000" * count + b'"',
        )
    )


def odd_multipart(rng: Random) -> bytes:
    picture_part = part(picture("PNG"))
    return rng.choice(
        (
            picture_part + part(b"x", b'name="model"') * 2 + END,
            part(picture("PNG"), b'name="images"; filename="../../../etc/passwd\0.png"') + END,
            part(picture("PNG"), b'name="im\0ages"; filename="a"') + END,
            part(b"x" * 100_000, b'name="' + b"n" * 100_000 + b'"') + END,
            part(b"1", b'name="beam_size"; ' + b"a=1; " * 20_000) + END,
            b"--x\r\n" + b"A: b\r\n" * 50_000 + b"\r\n\r\n" + END,
            b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n" + END,
            b"--x\r\n\r\n" * 1000,
            picture_part[:-50],
            END,
            b"--x" * 100_000,
            part(picture("PNG"), b"name*=utf-16''%ff; filename=\"\xff\xfe\"") + END,
            picture_part * 17 + END,
        )
    )


def disconnect(address: tuple[str, int], rng: Random) -> str:
    """Leaves in the middle of a request, or before its answer."""
    data = image_request(picture("PNG"), picture("JPEG"))
    with socket.create_connection(address, timeout=ANSWER_S) as connection:
        connection.sendall(data[: rng.choice((20, 200, len(data) // 2, len(data) - 1, len(data), len(data)))])
        time.sleep(rng.choice((0, 0, 0.01, 0.1)))
        if rng.random() < 0.5:  # without a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return "left"


def endless_chunks(address: tuple[str, int], rng: Random) -> str:
    head = f"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {rng.choice((JSON, MULTIPART))}\r\n"
    chunk = b"10000\r\n" + b"-" * 65536 + b"\r\n"
    return exchange(address, [f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), *[chunk] * 1000])


def endless_head(address: tuple[str, int], rng: Random) -> str:
    """A header, headers, an extension of a chunk, or a trailer without end."""
    head = b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    chunked = head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    start = rng.choice((b"GET /", head, head + b"x: ", chunked + b"1;", chunked + b"0\r\nx: "))
    return exchange(address, [start, *[(b"x: y\r\n" if start == head else b"y" * 6) * 20_000] * 1000])


def lengths(rng: Random) -> bytes:
    """Requests whose Content-Length is wrong."""
    body = b'{"images": [""]}'
    value = rng.choice(
        (b"-1", b"x", b"9" * 30, b"0x10", b"1e3", b"99999999999", b"+16", b"16\r\nContent-Length: 17", b"5", b"100",
         b"16\r\nTransfer-Encoding: chunked", b" ", b"16, 16")
    )  # fmt: skip
    head = b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    return head + value + b"\r\n\r\n" + body


def garbage(rng: Random) -> bytes:
    return rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\0" * 1000,
            b"GET /\r\n\r\n",
            b"GET / HTTP/1.1\nHost: 127.0.0.1\n\n",
            b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST /caption HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
            rng.randbytes(2000),
        )
    )


def headers(rng: Random) -> bytes:
    """Too many headers, or too long ones."""
    flood = rng.choice(
        (
            b"".join(b"x-%d: y\r\n" % number for number in range(20_000)),
            b"x: " + b"y" * 5_000_000 + b"\r\n",
            b"cookie: a=b\r\n" * 10_000,
            b"x\0y: z\r\n",
            b"origin: http://evil.example\r\n",
            b"authorization: Bearer " + b"x" * 100_000 + b"\r\n",
            b"content-encoding: gzip\r\n",
            b"x-request-timeout-seconds: -1\r\nx-request-disconnect-disabled: ?1\r\n",
            b"x-request-timeout-seconds: nan\r\nserve_multiplexed_model_id: ../x\r\n",
        )
    )
    return request(b"{}", JSON, headers=flood)


def web_socket(rng: Random) -> bytes:
    path = rng.choice(("/", "/caption", "/x"))
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    return request(b"", "", path, "GET", upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")


def explanation(rng: Random) -> bytes:
    options = rng.choice(({"caption": "x" * 10**6}, {"caption": "\0\ud800"}, {"head": 10**30}, {"attribution": True}))
    return json_request(json.dumps({"images": [""]} | options).encode(), "/explain")


def slow(address: tuple[str, int], rng: Random) -> str:
    """A byte per second, of the head or of the body."""
    data, start = image_request(picture("PNG")), rng.choice((10, 200))
    return exchange(address, [data[:start], *(data[place : place + 1] for place in range(start, start + 60))], 1.0)


Kind = Callable[[tuple[str, int], Random], str]


def _sent(make: Callable[[Random], bytes]) -> Kind:
    return lambda address, rng: exchange(address, [make(rng)])


KINDS: dict[str, Kind] = {
    **{f"decompression bomb, {kind}": _sent(lambda _, kind=kind: image_request(bomb(kind)))  # type: ignore[misc]
       for kind in ("PNG", "TIFF", "WEBP", "GIF")},
    "largest allowed image": _sent(lambda _: image_request(picture("PNG", 6_300))),
    "damaged image": _sent(lambda rng: image_request(damaged(rng.choice(FORMATS), rng))),
    "no image": _sent(lambda rng: image_request(rng.choice(NO_IMAGES))),
    "odd JSON": _sent(lambda rng: json_request(odd_json(rng), rng.choice(("/caption", "/explain")))),
    "huge or deep JSON": _sent(lambda rng: json_request(huge_json(rng))),
    "odd multipart": _sent(lambda rng: request(odd_multipart(rng), rng.choice((MULTIPART, MULTIPART[:19])))),
    "100,000 parts": _sent(lambda _: request(part(b"", b'name="a"') * 100_000 + END, MULTIPART)),
    "URI": _sent(lambda rng: json_request(json.dumps({"uris": [rng.choice(URIS)]}).encode())),
    "method": _sent(lambda rng: request(b"", JSON, method=rng.choice(METHODS))),
    "path": _sent(lambda rng: request(b"", JSON, rng.choice(PATHS), "GET")),
    "Content-Length": _sent(lengths),
    "headers": _sent(headers),
    "no HTTP": _sent(garbage),
    "explanation": _sent(explanation),
    "web socket": _sent(web_socket),
    "50 requests at once": _sent(lambda _: image_request(b"x") * 50),
    "chunks without end": endless_chunks,
    "head without end": endless_head,
    "client that leaves": disconnect,
}  # fmt: skip
