"""A Ray cluster for one test on the loopback: a head and further nodes, each a process that the test can kill."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ADDRESS = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Started by `ray start` with its own ports and temporary folder; `ray stop` would end other clusters too."""

    def __init__(self, token: str | None = None, cpus: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))  # short, because paths of sockets are limited
        self.port, self.dashboard = free_port(), f"http://{ADDRESS}:{free_port()}"
        self.token, self.nodes = token, list[subprocess.Popen[bytes]]()
        head = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard.rsplit(':', 1)[1]}"]
        head += [f"--dashboard-host={ADDRESS}", "--include-dashboard=true", f"--ray-client-server-port={free_port()}"]
        self._start([*head, f"--temp-dir={self.folder}"], cpus)

    def add_node(self, cpus: int = 1) -> subprocess.Popen[bytes]:
        return self._start([f"--address={ADDRESS}:{self.port}"], cpus)

    def _start(self, options: list[str], cpus: int) -> subprocess.Popen[bytes]:
        common = [f"--node-ip-address={ADDRESS}", f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}"]
        common += [f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}"]
        common += [f"--metrics-export-port={free_port()}", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]
        with (self.folder / f"node-{len(self.nodes)}.txt").open("wb") as log:
            node = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log, cwd=self.folder)
        self.nodes.append(node)
        return node

    def _environment(self) -> dict[str, str]:
        """The test's environment, without variables that name another Ray or give a job access to this checkout."""
        left_out = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment["RAY_agent_register_timeout_ms"] = "300000"  # on a busy machine Ray's 30 s are too short
        environment["RAY_AUTH_MODE"] = "token" if self.token else "disabled"
        if self.token:
            environment["RAY_AUTH_TOKEN"] = self.token
        return environment

    def wait(self, deadline_s: float = 120.0) -> None:
        """Until the jobs server answers, with a refusal or without."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            assert self.nodes[0].poll() is None, (self.folder / "node-0.txt").read_text()
            try:
                urllib.request.urlopen(f"{self.dashboard}/api/version", timeout=5).close()
                return
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    return
            except OSError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"no dashboard: {(self.folder / 'node-0.txt').read_text()}")

    @staticmethod
    def kill(node: subprocess.Popen[bytes]) -> int:
        """kill -9 of a node: its raylet and all that runs below. Returns how many processes that were."""
        below = psutil.Process(node.pid).children(recursive=True)
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        node.kill()
        node.wait()
        return len(below)

    def close(self) -> None:
        for node in reversed(self.nodes):
            if node.poll() is None:
                self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ray_cluster(token: str | None = None, cpus: int = 1) -> Iterator[Cluster]:
    cluster = Cluster(token, cpus)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()
