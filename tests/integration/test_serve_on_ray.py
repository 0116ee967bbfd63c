"""`raycap serve` on Ray: captions as everywhere else, batches, a replaced champion, and killed processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest

import raycap
from raycap.jobs.cli import main
from raycap.jobs.serve import deployments
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.serving.address import Limits, ServeArguments, named_models
from raycap.pipeline.tracking.pyfunc import PyfuncModel
from tests.conftest import ROOT
from tests.support.bundles import make_bundle, with_confidence, write_images
from tests.support.ray_cluster import free_port
from tests.support.serving import FILE_HEAD, MULTIPART, as_files, captions_by_digest, crown, is_right

pytestmark = pytest.mark.ray
BATCH = 8


class Served:
    """A running server, its bundles, and the captions of some images with each of them, by digest."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.bundles = [with_confidence(make_bundle(folder / str(seed), seed=seed)) for seed in range(3)]
        self.names = write_images(folder / "images", 12)
        crown(self.storage, "demo", self.bundles[1], 1)
        self.port = free_port()
        self.arguments = ServeArguments(
            models=(f"one={self.bundles[0]}", "champion:demo"),
            storage=str(self.storage),
            poll_s=0.2,
            batch_size=BATCH,
            loopback_only=True,
            limits=Limits(body_bytes=200_000, queue=16, body_s=5),
            threads=1,
        )
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self.captions = captions_by_digest(self.bundles, self.names)

    def ask(self, *names: str, model: str = "one") -> httpx2.Response:
        return self.client.post("/caption", files=as_files(*names), data={"model": model})

    def is_right(self, answer: httpx2.Response, *names: str) -> bool:
        """True if the captions are those of the model that the answer names."""
        return is_right(answer.json(), names, self.captions)


@pytest.fixture(scope="module")
def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("served"))
    deployments.start(found.arguments, named_models(found.arguments), "127.0.0.1", found.port, is_local=True)
    yield found
    deployments.stop()


def test_captions_are_those_of_the_api_the_command_and_the_pyfunc_model(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    names, bundle = served.names[:6], served.bundles[0]
    answer = served.ask(*names).json()
    service = CaptionService(load_bundle(bundle), device="cpu")
    assert main(["caption", *names, "--model", str(bundle), "--json"]) == 0
    doors = [
        [json.loads(line) for line in capsys.readouterr().out.splitlines()],
        [each.to_json() for each in raycap.load(bundle, device="cpu").caption(names)],
        PyfuncModel(service).predict({"image": [Path(name).read_bytes() for name in names]}),
    ]
    for rows in doors:
        for row, served_row in zip(rows, answer["captions"], strict=True):
            row.pop("image", None)
            assert row.pop("caption") == served_row["caption"]
            assert row == pytest.approx({key: served_row[key] for key in row}, abs=2e-4)
            assert row.keys() == {"log_prob", "confidence", "expected_ciderd"}
    explained = served.client.post("/explain", files=as_files(names[0])).json()
    expected = raycap.load(bundle, device="cpu").explain(names[0], attribution=False)
    assert explained["words"] == list(expected.words)
    assert sum(explained["attention"][0]) == pytest.approx(expected.attention[0].sum(), abs=1e-4)


def test_requests_at_the_same_time_share_batches(served: Served) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(served.ask, served.names * 3))
    for name, answer in zip(served.names * 3, answers, strict=True):
        assert answer.status_code == 200 and served.is_right(answer, name)
    counters = dict(re.findall(r'^(raycap_batch_size_\w+\{.*"one"\}) (.*)$', served.client.get("/metrics").text, re.M))
    count, total = (float(counters[f'raycap_batch_size_{part}{{model="one"}}']) for part in ("count", "sum"))
    assert total / count > 1.5, "no batches"
    assert float(counters[f'raycap_batch_size_bucket{{le="{BATCH}.0",model="one"}}']) == count, "larger than allowed"


def test_a_champion_is_replaced_under_load(served: Served) -> None:
    """No request fails, and every answer has the captions of the model that it names."""
    ended, wrong, seen = threading.Event(), [], list[str]()

    def ask() -> None:
        number = 0
        while not ended.is_set():
            pair = served.names[number % 11 : number % 11 + 2]
            answer = served.ask(*pair, model="demo")
            if answer.status_code != 200 or not served.is_right(answer, *pair):
                wrong.append(answer.text)
            else:
                seen.append(answer.json()["model"]["digest"])
            number += 1

    first, second = list(served.captions)[1:]
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()

    def wait_for(digest: str) -> None:
        deadline = time.monotonic() + 120
        while not seen or seen[-1] != digest:
            assert time.monotonic() < deadline and not wrong
            time.sleep(0.02)

    try:
        wait_for(first)
        crown(served.storage, "demo", served.bundles[2], 2)
        wait_for(second)
        damaged = crown(served.storage, "demo", served.bundles[0], 3)
        (served.storage / damaged.bundle / "vocabulary.json").write_text("{}")
        deadline = time.monotonic() + 120
        while not served.client.get("/models").json()["models"][1]["newer_failed"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        wait_for(second)
        crown(served.storage, "demo", served.bundles[1], 1)  # a rollback
        wait_for(first)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong and set(seen) == {first, second}


def test_a_killed_process_costs_a_retry(served: Served) -> None:
    assert served.is_right(served.ask(served.names[0]), served.names[0])
    replicas = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "ServeReplica:raycap:captioner-one" in " ".join(process.info["cmdline"] or ())
    ]
    assert len(replicas) == 1
    replicas[0].kill()
    statuses = []
    deadline = time.monotonic() + 180
    while True:
        answer = served.ask(served.names[0])
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            break
        assert answer.status_code == 503 and "try again" in answer.json()["error"], answer.text
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert served.is_right(answer, served.names[0]) and set(statuses) <= {200, 503}


def test_limits_hold_through_the_proxy(served: Served) -> None:
    answer = served.client.post("/caption", json={}, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403 and answer.json().keys() == {"error"}, answer.text
    pieces = 0

    def endless() -> Iterator[bytes]:
        nonlocal pieces
        yield FILE_HEAD
        while pieces < 10_000:
            pieces += 1
            yield bytes(50_000)

    try:
        answer = served.client.post("/caption", content=endless(), headers=MULTIPART)
        assert answer.status_code == 413
    except httpx2.TransportError:
        pass  # the server has closed the connection while the client was sending
    assert pieces < 10_000, "the whole body was read"
    with ThreadPoolExecutor(40) as pool:
        statuses = set(pool.map(lambda name: served.ask(name, *served.names[:8]).status_code, served.names * 8))
    assert statuses == {200, 429}


def ask_to_the_end(port: int, names: list[str], signaled: threading.Event, statuses: list[int]) -> None:
    """Sends requests until the server does not listen. One that was sent before the signal must be answered."""
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while True:
            is_later = signaled.is_set()
            try:
                statuses.append(client.post("/caption", files=as_files(*names)).status_code)
            except httpx2.TransportError:
                assert is_later, "a request in progress was cut off"
                return


@pytest.mark.proof
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_command_listens_on_the_loopback_and_ends_with_a_signal(
    served: Served, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A shell starts the command in the background, where Ctrl-C is ignored. It answers all requests before its end."""
    left_out = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAYCAP_SERVE_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    port = free_port()
    command = [sys.executable, "-m", "raycap", "serve", "--model", str(served.bundles[0]), "--port", str(port)]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    statuses, signaled = list[int](), threading.Event()
    try:
        deadline = time.monotonic() + 240
        while f"http://127.0.0.1:{port} (without a token); Ctrl-C stops it" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        assert log.read_text().splitlines()[-1].startswith("serving"), "the last line says where it listens"
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answer = client.post("/caption", files=as_files(served.names[0]))
        assert answer.status_code == 200 and served.is_right(answer, served.names[0])
        children = psutil.Process(process.pid).children(recursive=True)
        names = ""
        for child in [psutil.Process(process.pid), *children]:
            names += " ".join(child.cmdline())
            for each in child.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    address = each.laddr.ip.removeprefix("::ffff:")
                    assert address in ("127.0.0.1", "::1"), (child.cmdline(), each)
        assert "ServeReplica" in names and "ProxyActor" in names
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask_to_the_end, port, served.names, signaled, statuses) for _ in range(4)]
            while len(statuses) < 8:
                assert not any(each.done() for each in asked)
                time.sleep(0.1)
            signaled.set()
            process.send_signal(number)
            assert process.wait(240) == code
        for each in asked:
            each.result()
        assert set(statuses) == {200, 503}, statuses
        assert log.read_text().splitlines()[-1] == "the server has stopped"
        assert "Traceback" not in log.read_text()
        _, alive = psutil.wait_procs(children, 30)
        assert not alive
    finally:
        process.kill()
