"""A Ray cluster on the loopback whose nodes share no disk: a head and worker nodes, each a process that a test can kill.

Every node is a process in its own mount namespace, in which the folder `Cluster.disk` is this node's disk. The path is
the same on all nodes and the files are not, as on real machines. `Cluster.start` runs a program, such as a driver, on a
node: it sees that node's disk.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

ADDRESS = "127.0.0.1"
HEAD = 0
DRIVER = -1  # a machine outside the cluster, with its own disk
MOUNT = 'mkdir -p "$1" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
ALIVE = "import ray; ray.init('{}', log_to_driver=False); print('nodes', sum(n['Alive'] for n in ray.nodes()))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


@cache
def can_mount() -> bool:
    """Whether this process may create mount namespaces."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


class Cluster:
    """Started by `ray start` with its own ports and temporary folder; `ray stop` would end other clusters as well."""

    def __init__(self, token: str | None = None, cpus: int = 1, variables: Mapping[str, str] | None = None) -> None:
        """cpus: of the head. variables: environment variables of all nodes and programs."""
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))  # short, because paths of sockets are limited
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.port, self.dashboard = free_port(), f"http://{ADDRESS}:{free_port()}"
        self.address = f"{ADDRESS}:{self.port}"
        self.token, self.variables = token, dict(variables or {})
        self.nodes = list[subprocess.Popen[bytes]]()
        self.programs = list[subprocess.Popen[bytes]]()
        head = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard.rsplit(':', 1)[1]}"]
        head += [f"--dashboard-host={ADDRESS}", "--include-dashboard=true", f"--ray-client-server-port={free_port()}"]
        self._start_node([*head, f"--temp-dir={self.folder / 'ray'}"], cpus)

    def add_node(self, cpus: int = 1, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Starts a worker node and returns without waiting for it. options: further options of `ray start`."""
        return self._start_node([f"--address={self.address}", *options], cpus)

    def join_node(self, cpus: int = 1, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Starts a worker node and waits until the cluster has it; repeats a start that failed."""
        before = self.num_alive()
        for _ in range(4):
            node = self.add_node(cpus, options)
            until = time.monotonic() + 40
            while time.monotonic() < until and node.poll() is None:
                if self.num_alive() > before:
                    return node
            self.kill(node)
        raise AssertionError((self.folder / f"node-{len(self.nodes) - 1}.txt").read_text())

    def num_alive(self) -> int:
        """The number of nodes that the cluster has now."""
        program = self.start(HEAD, [sys.executable, "-c", ALIVE.format(self.address)], self.folder / "alive.txt")
        program.wait(120)
        words = (self.folder / "alive.txt").read_text().split()
        return int(words[-1]) if "nodes" in words else 0

    def start(self, node: int, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program on a node's disk; `DRIVER` is the disk of a machine outside the cluster."""
        program = self._start_on(node, command, log, self._environment() | variables)
        self.programs.append(program)
        return program

    def _start_node(self, options: list[str], cpus: int) -> subprocess.Popen[bytes]:
        common = [f"--node-ip-address={ADDRESS}", f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}"]
        common += [f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}"]
        common += [f"--metrics-export-port={free_port()}", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]
        number = len(self.nodes)
        node = self._start_on(number, command, self.folder / f"node-{number}.txt", self._environment())
        self.nodes.append(node)
        return node

    def _start_on(self, number: int, command: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
        disk = self.folder / "disks" / str(number)
        disk.mkdir(parents=True, exist_ok=True)
        mount = ["unshare", "-m", "sh", "-c", MOUNT, "sh", str(disk), str(self.disk)] if can_mount() else []
        with log.open("wb") as output:
            return subprocess.Popen(
                [*mount, *command], env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder
            )

    def _environment(self) -> dict[str, str]:
        """The test's environment, without variables that name another Ray or give a job access to this checkout."""
        left_out = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment["RAY_agent_register_timeout_ms"] = "300000"  # on a busy machine Ray's 30 s are too short
        environment["RAY_AUTH_MODE"] = "token" if self.token else "disabled"
        environment["RAYCAP_CACHE"] = str(self.disk / "cache")
        if self.token:
            environment["RAY_AUTH_TOKEN"] = self.token
        return environment | self.variables

    def wait(self, deadline_s: float = 120.0) -> None:
        """Waits until the jobs server answers, if only with a refusal."""
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
        """Kills a node or a program with all processes below it (SIGKILL). Returns how many processes were below."""
        below = []
        with suppress(psutil.Error):
            below = psutil.Process(node.pid).children(recursive=True)
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        node.kill()
        node.wait()
        return len(below)

    def close(self) -> None:
        for process in (*self.programs, *reversed(self.nodes)):
            if process.poll() is None:
                self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ray_cluster(token: str | None = None, cpus: int = 1, variables: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster with only a head. The test is skipped where processes cannot have private disks."""
    if not can_mount():
        pytest.skip("no mount namespaces here (`unshare -m` needs root), so nodes would share a disk")
    cluster = Cluster(token, cpus, variables)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()
