"""`raycap serve` on a cluster under load: killed processes, a lost node, new champions, and S3 without answers."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT
from tests.support.bundles import make_bundle, write_images
from tests.support.ray_cluster import ADDRESS, HEAD, Cluster, free_port, processes, ray_cluster
from tests.support.s3_server import plan_outage
from tests.support.serving import captions_by_digest, crown
from tests.support.serving_load import Clients

OUTAGE_S = 20.0
DEADLINE_S = 300.0
HEADER = ("fault", "answers", "retried", "refusals", "longest, s", "new champion, s", "whole again, s")
pytestmark = pytest.mark.proof


class Service:
    """The server on a cluster, started as its user does on the head, and the faults that it must survive."""

    def __init__(self, cluster: Cluster, url: str, folder: Path) -> None:
        self.cluster, self.url = cluster, url
        self.storage = StoragePath("s3://data/serving", StorageOptions(url))
        self.bundles = [make_bundle(folder / str(seed), seed=seed) for seed in range(4)]
        self.captions = captions_by_digest(self.bundles, write_images(folder / "images", 12))
        self.digests = list(self.captions)
        self.killed = set[int]()
        shutil.copytree(self.bundles[0], cluster.folder / f"disks/{HEAD}/disk/bundle")  # no other node has it
        crown(self.storage, "demo", self.bundles[1], 1)
        self.port, self.log = free_port(), cluster.folder / "serve.txt"
        words = ["serve", "--address", cluster.address, "--port", str(self.port), "--poll-s", "1"]
        words += ["--model", "champion:demo", "--model", f"local={cluster.disk}/bundle", "--replicas", "2"]
        words += ["--storage", str(self.storage), "--threads", "1"]
        self.program = cluster.start(HEAD, [sys.executable, "-m", "raycap", *words], self.log)
        deadline = time.monotonic() + DEADLINE_S
        while "Ctrl-C stops it" not in self.log.read_text():
            assert self.program.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def running(self) -> dict[str, list[int]]:
        """The process ids of the replicas that Ray Serve calls ready, by deployment."""
        with urllib.request.urlopen(f"{self.cluster.dashboard}/api/serve/applications/", timeout=30) as answer:
            deployments = json.load(answer)["applications"]["raycap"]["deployments"]
        return {
            name: sorted(replica["pid"] for replica in each["replicas"] if replica["state"] == "RUNNING")
            for name, each in deployments.items()
        }

    def is_whole(self) -> bool:
        """True if all replicas run and Ray Serve has noticed that the killed ones have ended."""
        running = self.running()
        if self.killed & {pid for pids in running.values() for pid in pids}:
            return False
        return [len(running[name]) for name in ("ingress", "captioner-demo", "captioner-local")] == [1, 2, 2]

    def kill(self, deployment: str) -> None:
        """SIGKILL for a replica."""
        pid = self.running()[deployment][0]
        self.killed.add(pid)
        psutil.Process(pid).kill()

    def lose_a_node(self) -> None:
        """Kills all processes of a worker node with captioners. The node with the ingress is spared."""
        for node in self.cluster.nodes[1:]:
            captioners = processes(node, "captioner-")
            if captioners and not processes(node, ":ingress"):
                self.killed |= {process.pid for process in captioners}
                self.cluster.kill(node)
                return
        raise AssertionError("no such node")

    def outage(self) -> None:
        """S3 refuses everything, and a replica of the champion dies, whose successor needs S3."""
        plan_outage(self.url, OUTAGE_S)
        self.kill("captioner-demo")
        time.sleep(OUTAGE_S)


@pytest.fixture
def service(s3: str, tmp_path: Path) -> Iterator[Service]:
    with ray_cluster(variables={"PYTHONPATH": str(ROOT), "AWS_ENDPOINT_URL_S3": s3}) as cluster:
        cluster.join_nodes(2, cpus=5)  # each has room for all replicas
        yield Service(cluster, s3, tmp_path)


def test_faults_cost_retries_and_nothing_else(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    storage, bundles = service.storage, service.bundles
    faults: tuple[tuple[str, Callable[[], object], int | None], ...] = (
        ("none, for 20 s", lambda: time.sleep(20), None),
        ("a captioner is killed", lambda: service.kill("captioner-local"), None),
        ("a new champion", lambda: crown(storage, "demo", bundles[2], 2), 2),
        ("a rollback", lambda: crown(storage, "demo", bundles[1], 1), 1),
        ("a node is lost", service.lose_a_node, None),
        ("S3 refuses for 20 s, a captioner is killed", service.outage, None),
        ("a new champion after that", lambda: crown(storage, "demo", bundles[3], 3), 3),
        ("the ingress is killed", lambda: service.kill("ingress"), None),
    )
    rows = []
    with capsys.disabled(), Clients(f"http://{ADDRESS}:{service.port}", service.captions, ("demo", "local")) as clients:
        clients.settle()
        for name, cause, champion in faults:
            begin = time.monotonic()
            cause()
            if champion is None:
                clients.wait_until(service.is_whole, f"all replicas after: {name}", DEADLINE_S)
                whole = time.monotonic()
                clients.settle()
            else:
                clients.settle("demo", service.digests[champion])
                whole = time.monotonic()
            assert service.program.poll() is None, service.log.read_text()[-4000:]
            answered = [each for each in list(clients.answered) if each.end >= begin]
            refusals = Counter(refusal for each in answered for refusal in each.refusals)
            new = [each.end for each in answered if champion and each.digest == service.digests[champion]]
            rows.append(
                (
                    name,
                    len(answered),
                    sum(bool(each.refusals) for each in answered),
                    ", ".join(f"{count} x {status}" for status, count in sorted(refusals.items())) or "none",
                    f"{max(each.end - each.begin for each in answered):.1f}",
                    f"{new[0] - begin:.1f}" if new else "",
                    f"{whole - begin:.1f}",
                )
            )
            print(rows[-1], flush=True)
    assert not clients.errors, clients.errors[:5]
    assert {each.model for each in clients.answered} == {"demo", "local"}
    with capsys.disabled():
        for row in (HEADER, ["---"] * len(HEADER), *rows):
            print(f"| {' | '.join(map(str, row))} |")
    assert "Traceback" not in service.log.read_text()
