"""`raycap serve` for a long time, with clients, requests that mean harm, and champions that replace each other.

RAYCAP_SOAK_MINUTES is the length (10; less is too short for memory to settle), and RAYCAP_SOAK_OUT the folder of
soak.csv, soak.png and soak.md (the test's temporary folder).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from tests.conftest import ROOT
from tests.support.bundles import make_bundle, write_images
from tests.support.hostile_requests import KINDS, slow
from tests.support.ray_cluster import ADDRESS, free_port
from tests.support.serving import captions_by_digest, crown
from tests.support.serving_load import Clients, as_table
from tests.support.soak import MIB, Samples, start

MINUTES = float(os.environ.get("RAYCAP_SOAK_MINUTES", 10))
WARM_S = min(120.0, MINUTES * 20)
SAMPLE_S = 2.0
CHAMPION_S = 20.0  # between two champions
SLACK_MIB = 16.0  # of the growth after warm-up; 2 KiB per answer would be 20 MiB in 10 minutes
ALLOWED = {"closed", "left", "100", "200", "400", "403", "404", "405", "408", "413", "415", "422", "429", "503"}
TITLES = {
    "proxy": "ProxyActor",
    "ingress": "raycap:ingress",
    "captioner, champion": "raycap:captioner-demo",
    "captioner, bundle": "raycap:captioner-one",
    "controller": "ServeController",
}
pytestmark = [pytest.mark.proof, pytest.mark.ray]


class Server:
    """The server on this machine, started as its user does."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.bundles = [make_bundle(folder / str(seed), seed=seed) for seed in range(3)]
        self.captions = captions_by_digest(self.bundles, write_images(folder / "images", 12))
        crown(self.storage, "demo", self.bundles[1], 1)
        self.port, log = free_port(), folder / "log.txt"
        words = ["raycap", "serve", "--model", "champion:demo", "--model", f"one={self.bundles[0]}", "--poll-s", "1"]
        words += ["--storage", str(self.storage), "--port", str(self.port), "--threads", "1"]
        words += ["--limit", f"body_bytes={8 * 2**20}", "--limit", "body_s=10"]
        self.command = start(words, log, {"HOME": str(folder), "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 240
        while "Ctrl-C stops it" not in log.read_text():
            assert self.command.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        self.processes = {"command": psutil.Process(self.command.pid)}
        for name, title in TITLES.items():
            (self.processes[name],) = [each for each in self.children() if title in " ".join(each.cmdline())]
        self.samples = Samples({name: _memory_of(process) for name, process in self.processes.items()})

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.command.pid).children(recursive=True)

    def close(self) -> None:
        children = self.children()
        self.command.send_signal(signal.SIGINT)
        self.command.wait(120)
        for left in psutil.wait_procs(children, 30)[1]:
            left.kill()


def _memory_of(process: psutil.Process) -> Callable[[], float]:
    """The resident memory of a process in MiB without what it shares: libraries, and Ray's object store."""

    def measured() -> float:
        memory = process.memory_info()
        return float(memory.rss - memory.shared) / MIB

    return measured


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short, because paths of sockets are limited
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


class Attackers:
    """Threads that send requests that mean harm. statuses: how many of each kind got which."""

    def __init__(self, port: int) -> None:
        self.address, self.over = (ADDRESS, port), threading.Event()
        self.statuses: Counter[tuple[str, str]] = Counter()
        work = [(self._attack, 0), (self._attack, 1), (self._slowly, 2), (self._slowly, 3), (self._explore, 4)]
        self.threads = [threading.Thread(target=target, args=(Random(seed),)) for target, seed in work]

    def _attack(self, rng: Random) -> None:
        while not self.over.is_set():
            for name in rng.sample(list(KINDS), len(KINDS)):
                self.statuses[name, KINDS[name](self.address, rng)] += 1
                if self.over.wait(0.5):
                    return

    def _slowly(self, rng: Random) -> None:
        while not self.over.is_set():
            self.statuses["a byte per second", slow(self.address, rng)] += 1

    def _explore(self, rng: Random) -> None:
        """Requests made from the OpenAPI document."""
        schemathesis = pytest.importorskip("schemathesis")
        url = f"http://{self.address[0]}:{self.address[1]}/openapi.json"
        for operation in schemathesis.openapi.from_url(url).get_all_operations():

            @settings(max_examples=20, deadline=None, database=None, suppress_health_check=[*HealthCheck])
            @given(case=operation.ok().as_strategy())
            def check(case: Any) -> None:
                self.statuses["schemathesis", str(case.call().status_code)] += 1

            check()

    def __enter__(self) -> Attackers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_harm_costs_neither_answers_nor_memory(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, url = server.samples, f"http://{ADDRESS}:{server.port}"
    with (
        capsys.disabled(),
        Clients(url, server.captions, ("demo", "one")) as clients,
        Attackers(server.port) as attackers,
    ):
        begin, number = time.monotonic(), 0
        while (seconds := time.monotonic() - begin) < 60 * MINUTES and not clients.errors:
            samples.take()
            if seconds > CHAMPION_S * (number + 1):
                number += 1
                crown(server.storage, "demo", server.bundles[1 + number % 2], 1 + number % 2)
            time.sleep(SAMPLE_S)
    died = [name for name, process in server.processes.items() if not process.is_running()]
    out = Path(os.environ.get("RAYCAP_SOAK_OUT", tmp_path))
    samples.write(out)
    hours = (samples.rows[-1]["seconds"] - WARM_S) / 3600
    memory = [(name, *samples.growth(name, WARM_S)) for name in server.processes]
    rows = [
        (name, f"{median - growth / 2:.1f}", f"{median + growth / 2:.1f}", f"{growth / hours:+.1f}")
        for name, growth, median in memory
    ]
    tables = as_table(("process", "MiB after warm-up", "MiB at the end", "MiB per hour"), rows) + "\n\n"
    by_kind: dict[str, list[str]] = {}
    for (kind, status), count in sorted(attackers.statuses.items()):
        by_kind.setdefault(kind, []).append(f"{count} x {status}")
    tables += as_table(("harm", "statuses"), [(kind, ", ".join(counts)) for kind, counts in by_kind.items()])
    refusals = Counter(refusal for each in clients.answered for refusal in each.refusals)
    num_harmful = attackers.statuses.total()
    summary = (
        f"{len(clients.answered)} answers, refused {dict(refusals)}, {num_harmful} harmful requests, {number} champions"
    )
    (out / "soak.md").write_text(f"{tables}\n\n{summary}\n")
    with capsys.disabled():
        print(f"\n{tables}\n\n{summary}")

    assert not clients.errors and refusals.keys() <= {"429", "503"}, (clients.errors[:5], refusals)
    assert num_harmful > 300 * min(1.0, MINUTES / 10)
    assert {status for _, status in attackers.statuses} <= ALLOWED, by_kind
    assert not died, f"processes have died: {died}"
    for name, growth, median in memory:
        assert growth <= SLACK_MIB, f"{name} grows by {growth:.1f} of {median:.1f} MiB"
