"""The HTTP interface without Ray: answers, limits, access, and requests that mean harm."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

import raycap
from raycap.pipeline.serving.address import Limits
from raycap.pipeline.serving.host import FAILED, RefusedError
from tests.support.bundles import make_bundle, with_confidence, write_images
from tests.support.serving import FILE_HEAD, MULTIPART, LocalCaptioners, as_files, host_of, local_client

TOKEN = "a token of many letters".replace(" ", "-")
SMALL = Limits(body_bytes=60_000, image_bytes=20_000, pixels=10_000, images=3, beam_size=6, num_results=4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_confidence(make_bundle(tmp_path_factory.mktemp("served") / "bundle"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("served") / "other", seed=1)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_images(tmp_path_factory.mktemp("images"), 5)


@pytest.fixture(scope="module")
def captioners(bundle: Path) -> LocalCaptioners:
    return LocalCaptioners(host_of(bundle))


@pytest.fixture(scope="module")
def client(captioners: LocalCaptioners, other: Path) -> Iterator[TestClient]:
    models = {"main": captioners, "other": LocalCaptioners(host_of(other))}
    with local_client(models, limits=SMALL) as opened:
        yield opened


def same(captions: list[dict[str, Any]], expected: list[raycap.ImageCaption]) -> None:
    assert [row["caption"] for row in captions] == [each.caption for each in expected]
    for row, each in zip(captions, expected, strict=True):
        assert row == pytest.approx(each.to_json(), abs=1e-4) or "n_best" in row


def test_files_give_the_captions_of_the_api(bundle: Path, client: TestClient, names: list[str]) -> None:
    captioner = raycap.load(bundle, device="cpu")
    expected = captioner.caption(names[:3])
    answer = client.post("/caption", files=as_files(*names[:3]))
    assert answer.status_code == 200, answer.text
    same(answer.json()["captions"], expected)
    assert answer.json()["model"] == {"name": "main", "bundle": "small", "digest": captioner.model.digest}
    assert answer.headers["cache-control"] == "no-store"
    options = {"beam_size": 3, "num_results": 2, "max_length": 7}
    expected = captioner.caption(names[:2], beam_size=3, num_results=2, max_length=7)
    answer = client.post("/caption", files=as_files(*names[:2]), data=options)
    for row, each in zip(answer.json()["captions"], expected, strict=True):
        assert [entry["caption"] for entry in row["n_best"]] == [ranked.caption for ranked in each.n_best]
        assert "confidence" not in row, "the bundle has none for this search"


def test_models_are_chosen_by_name(client: TestClient, other: Path, names: list[str]) -> None:
    answer = client.post("/caption", files=as_files(names[0]), data={"model": "other"}).json()
    captioner = raycap.load(other, device="cpu")
    assert answer["model"]["name"] == "other" and answer["model"]["digest"] == captioner.model.digest
    same(answer["captions"], captioner.caption(names[:1]))
    listed = client.get("/models").json()
    assert listed["default"] == "main" and [model["name"] for model in listed["models"]] == ["main", "other"]
    assert [model["has_confidence"] for model in listed["models"]] == [True, False]
    for path, method in (("/caption", "POST"), ("/models", "GET")):
        refused = client.request("DELETE", path)
        assert refused.status_code == 405 and refused.headers["Allow"] == method
        assert refused.json() == {"error": f"this path answers {method} only"}


def test_explanations_are_those_of_the_api(bundle: Path, client: TestClient, names: list[str]) -> None:
    captioner = raycap.load(bundle, device="cpu")
    expected = captioner.explain(names[0], attribution=False)
    answer = client.post("/explain", files=as_files(names[0])).json()
    assert answer["caption"] == expected.caption and answer["words"] == list(expected.words)
    assert answer["grid"] == [4, 4]
    np.testing.assert_allclose(answer["attention"], expected.attention, atol=1e-5)
    options = {"caption": "a red cat", "head": 1}
    answer = client.post("/explain", files=as_files(names[0]), data=options).json()
    expected = captioner.explain(names[0], caption="a red cat", head=1, attribution=False)
    assert answer["words"] == ["a", "red", "cat"]
    np.testing.assert_allclose(answer["attention"], expected.attention, atol=1e-5)
    refused: list[dict[str, Any]] = [{"caption": "cat " * 20}, {"head": 2}, {"caption": "x" * 1001}]
    for bad in refused:
        answer = client.post("/explain", files=as_files(names[0]), data=bad)
        assert answer.status_code == 422 and answer.json().keys() == {"error"}


def png(width: int, height: int, level: int = 9) -> bytes:
    """A valid black PNG file of any size, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(level)
    row = bytes(1 + width // 8 + 1)
    body = b"".join(packer.compress(row) for _ in range(min(height, 500))) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def part(data: bytes) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="m"\r\n\r\n' + data + b"\r\n"


@pytest.mark.parametrize(
    ("status", "key", "make"),
    [
        (413, "60000 bytes", lambda image: {"content": bytes(60_001), "headers": MULTIPART}),
        (413, "image 0", lambda image: {"files": {"images": ("a", bytes(20_001))}}),
        (400, "files", lambda image: {"files": [("images", ("a", image))] * 4}),
        (413, "pixels", lambda image: {"files": {"images": ("a", png(100_000, 100_000))}}),
        (415, "Content-Type", lambda image: {"content": b"x", "headers": {"content-type": "text/plain"}}),
        (415, "Content-Type", lambda image: {"json": {"images": []}}),
        (415, "send image files as multipart/form-data", lambda image: {"data": {"images": "aGVsbG8="}}),
        (422, "no image file; send one or more, as curl", lambda image: {"files": {"images": (None, "a.jpg")}}),
        (415, "image 1", lambda image: {"files": [("images", ("a", image)), ("images", ("b", b"<svg/>"))]}),
        (422, "image 0", lambda image: {"files": {"images": ("a", image[:-30])}}),
        (422, "no image file", lambda image: {"content": b"--x--\r\n", "headers": MULTIPART}),
        (422, "image: there is no such field", lambda image: {"files": {"a": image}, "data": {"image": ""}}),
        (422, "model 'x'", lambda image: {"files": {"a": image}, "data": {"model": "x"}}),
        (422, "beam_size", lambda image: {"files": {"a": image}, "data": {"beam_size": 7}}),
        (422, "valid integer", lambda image: {"files": {"a": image}, "data": {"beam_size": "x"}}),
        (422, "num_results", lambda image: {"files": {"a": image}, "data": {"beam_size": 2, "num_results": 4}}),
        (400, "", lambda image: {"content": b"x", "headers": MULTIPART}),
        (400, "size", lambda image: {"content": part(b"m" * 20_000) + b"--x--\r\n", "headers": MULTIPART}),
        (400, "fields", lambda image: {"content": part(b"1") * 30 + b"--x--\r\n", "headers": MULTIPART}),
    ],
)
def test_a_request_that_cannot_be_served_gets_one_sentence(
    client: TestClient, names: list[str], status: int, key: str, make: Callable[[bytes], dict[str, Any]]
) -> None:
    answer = client.post("/caption", **make(Path(names[0]).read_bytes()))
    assert (answer.status_code, answer.json().keys()) == (status, {"error"}), answer.text
    sentence = answer.json()["error"]
    assert key in sentence and "\n" not in sentence and "Traceback" not in sentence


def test_a_body_without_end_or_that_comes_slowly_is_refused(captioners: LocalCaptioners) -> None:
    sent = 0

    def ask(limits: Limits, pause_s: float) -> int:
        """The status of the answer to a body without end, by the application itself."""
        statuses, first = [], [FILE_HEAD]

        async def receive() -> dict[str, Any]:
            nonlocal sent
            sent += 1000
            await asyncio.sleep(pause_s)
            return {"type": "http.request", "body": (first.pop() if first else b"") + bytes(1000), "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status"))

        headers = [(b"host", b"localhost"), (b"content-type", MULTIPART["content-type"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/caption", "query_string": b"", "headers": headers}
        asyncio.run(local_client({"main": captioners}, limits=limits).app(scope, receive, send))
        return int(statuses[0])

    assert ask(Limits(body_bytes=5000), 0) == 413 and sent <= 6000
    assert ask(Limits(body_s=0.05), 0.02) == 408


def test_a_late_answer_is_refused(bundle: Path, names: list[str]) -> None:
    captioners = LocalCaptioners(host_of(bundle))
    with local_client({"main": captioners}, limits=Limits(answer_s=0.2)) as client:
        captioners.wait = asyncio.Event()  # which nobody sets
        answer = client.post("/caption", files=as_files(names[0]))
        assert answer.status_code == 503 and answer.json()["error"].startswith("there was no answer within 0.2 s")
        assert answer.headers["retry-after"] == "5"


@contextmanager
def requests_in_progress(client: TestClient, captioners: LocalCaptioners, name: str, count: int) -> Iterator[None]:
    """Within the context, this number of requests is in progress. At its end, they are answered."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(client.post("/caption", files=as_files(name)).status_code))
        for _ in range(count)
    ]
    before = captioners.num_jobs
    event = captioners.wait = asyncio.Event()
    for thread in threads:
        thread.start()
    while captioners.num_jobs < before + count:
        time.sleep(0.01)
    try:
        yield
    finally:
        client.portal.call(event.set)  # type: ignore[union-attr]
        for thread in threads:
            thread.join()
        captioners.wait = None
    assert statuses == [200] * count


@pytest.mark.parametrize(
    ("count", "memory_mb", "status", "sentence"),
    [(2, 1e6, 429, "works on 2 requests"), (1, 0, 503, "no memory for further bodies")],
)
def test_too_many_requests_and_bodies_are_refused(
    captioners: LocalCaptioners, names: list[str], monkeypatch: pytest.MonkeyPatch,
    count: int, memory_mb: float, status: int, sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("raycap.pipeline.serving.app.free_memory_mb", lambda: memory_mb)
    with local_client({"main": captioners}, limits=Limits(queue=2)) as client:
        with requests_in_progress(client, captioners, names[0], count):
            answer = client.post("/caption", files=as_files(names[0]))
            assert answer.status_code == status and sentence in answer.json()["error"]
            assert answer.headers["retry-after"] == "1"
            assert f"raycap_requests_in_progress {count}.0" in client.get("/metrics").text
        assert client.post("/caption", files=as_files(names[0])).status_code == 200


def test_a_server_that_stops_answers_what_it_has_begun(captioners: LocalCaptioners, names: list[str]) -> None:
    with local_client({"main": captioners}) as client:
        server = client.app.state.server  # type: ignore[attr-defined]
        with requests_in_progress(client, captioners, names[0], 2):
            stopped = client.portal.start_task_soon(server.stop)  # type: ignore[union-attr]
            while not server.is_stopping:
                time.sleep(0.01)
            for method, path in (("POST", "/caption"), ("GET", "/")):
                answer = client.request(method, path)
                assert answer.status_code == 503 and "is stopping" in answer.json()["error"]
                assert answer.headers["retry-after"] == "5"
            assert not stopped.done()
        stopped.result(60)


def test_a_failure_is_said_without_its_reason(bundle: Path, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    captioners = LocalCaptioners(host_of(bundle))
    captioners.fails = RuntimeError("/secret/path failed")
    client = local_client({"main": captioners})
    answer = client.post("/caption", files=as_files(names[0]))
    assert answer.status_code == 500 and answer.json() == {"error": FAILED}
    assert "/secret/path failed" in caplog.text, "the log has the reason"
    captioners.fails = RefusedError(503, "the model's process has ended", 1)
    answer = client.post("/caption", files=as_files(names[0]))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_requests_need_the_token(captioners: LocalCaptioners, names: list[str]) -> None:
    client = local_client({"main": captioners}, TOKEN)
    for text in ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer \xff"):
        headers = [(b"authorization", text.encode("latin-1"))] if text else []
        for method, path in (("POST", "/caption"), ("GET", "/models"), ("GET", "/metrics")):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in answer.text
    headers = {"authorization": f"Bearer {TOKEN}", "host": "elsewhere.example", "origin": "http://page.example"}
    assert client.post("/caption", files=as_files(names[0]), headers=headers).status_code == 200
    assert client.get("/").status_code == 200


def test_pages_from_elsewhere_cannot_use_a_server_without_a_token(
    captioners: LocalCaptioners, names: list[str]
) -> None:
    client = local_client({"main": captioners})
    for status, headers in (
        (403, {"origin": "http://evil.example"}),
        (403, {"origin": "null"}),
        (400, {"host": "evil.example:8000"}),
        (400, {"host": ""}),
    ):
        answer = client.post("/caption", files=as_files(names[0]), headers=headers)
        assert answer.status_code == status, headers
    for headers in ({"host": "localhost:8000", "origin": "http://localhost:8000"}, {"host": "[::1]"}, {}):
        assert client.post("/caption", files=as_files(names[0]), headers=headers).status_code == 200, headers
    open_to_all = local_client({"main": captioners}, loopback_only=False)
    assert open_to_all.get("/models", headers={"host": "server.example"}).status_code == 200


def test_the_page_loads_nothing_and_allows_its_own_script_only(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in answer.text.replace("http://www.w3.org", "") and "https://" not in answer.text
    assert not any(handler in answer.text for handler in (" onclick=", " onload=", " onerror=", "javascript:"))
    assert "style=" not in answer.text and "innerHTML" not in answer.text


@pytest.mark.proof
def test_schemathesis_finds_no_failure(captioners: LocalCaptioners) -> None:
    """Requests made from the OpenAPI document."""
    schemathesis = pytest.importorskip("schemathesis")
    app = local_client({"main": captioners}, limits=SMALL, loopback_only=False).app
    found: set[str] = set()
    for operation in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():

        @settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
        @given(case=operation.ok().as_strategy())
        def check(case: Any) -> None:
            answer = case.call()
            found.add(case.path)
            assert answer.status_code < 500, answer.text
            assert answer.status_code < 400 or answer.json().keys() == {"error"}

        check()
    assert found >= {"/caption", "/explain", "/models", "/metrics"}
