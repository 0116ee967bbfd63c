"""A Ray cluster on the loopback whose nodes share no disk: a head and workers, each a process that a test can kill.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ADDRESS = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
HEAD, OUTSIDE = "0", "laptop"  # a machine outside the cluster has a disk of its own, too
TIMEOUT_S = 900
# $1: the folder of what is private to a node, $2: the cluster's folder. Ray's folder is private, too, because nodes
# that share it would replace the unpacked code of a job while another node runs it.
MOUNT = (
    'mkdir -p "$1/disk" "$1/ray" && mount --bind "$1/disk" "$2/disk" && mount --bind "$1/ray" "$2/ray" && '
    'shift 2 && exec "$@"'
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


@cache
def can_mount() -> bool:
    """Whether this process may create mount namespaces."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def on_disk(folder: Path, name: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` where the node `name` of the cluster in `folder` has its disk."""
    return ["unshare", "-m", "sh", "-c", MOUNT, "sh", str(folder / "disks" / name), str(folder), *command]


def node_command(folder: Path, name: str, cpus: int, options: Sequence[str]) -> list[str]:
    """The command of a node: `ray start` with ports of its own, on a disk of its own."""
    ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--node-ip-address={ADDRESS}"]
    start += [f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats", "--block"]
    return on_disk(folder, name, [*start, *(f"--{port}={free_port()}" for port in ports)])


class Cluster:
    """Started by `ray start` with its own ports and temporary folder; `ray stop` would end other clusters as well."""

    def __init__(
        self,
        token: str | None = None,
        cpus: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """cpus: of the head. variables: environment variables of all nodes and programs."""
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))  # short, because paths of sockets are limited
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        (self.folder / "ray").mkdir()
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

    def join_nodes(self, count: int = 1, cpus: int = 1, options: Sequence[str] = ()) -> None:
        """Starts worker nodes at the same time and waits until they are in the cluster. Failed starts are repeated."""
        for _ in range(4):
            nodes = {self.log(): self.add_node(cpus, options) for _ in range(count)}
            count -= sum(self._has_joined(node, log) for log, node in nodes.items())
            if count == 0:
                return
        raise AssertionError("\n".join(log.read_text() for log in nodes))

    def _has_joined(self, node: subprocess.Popen[bytes], log: Path) -> bool:
        """Waits until `ray start` says that its node is in the cluster. Kills the node and returns False otherwise."""
        until = time.monotonic() + 120
        while time.monotonic() < until and node.poll() is None:
            if "Ray runtime started" in log.read_text():
                return True
            time.sleep(0.1)
        self.kill(node)
        return False

    def log(self) -> Path:
        """The log of the node that is started next."""
        return self.folder / f"node-{len(self.nodes)}.txt"

    def start(self, node: str, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program on the disk of a node: `HEAD`, or any name for the disk of a machine outside the cluster."""
        program = self._start(on_disk(self.folder, node, command), log, variables)
        self.programs.append(program)
        return program

    def write(self, name: str, values: dict[str, Any]) -> str:
        """Writes a configuration, which all nodes can read; returns its path."""
        (self.folder / name).write_text(yaml.safe_dump(values))
        return str(self.folder / name)

    def raycap(
        self, *words: str, node: str = HEAD, exit_code: int = 0, meanwhile: Callable[[Path], object] | None = None
    ) -> str:
        """The output of `raycap WORDS` on the disk of a node. The command must end with `exit_code`.

        meanwhile: called with the log of the command while it runs.
        """
        log = self.folder / f"command-{len(self.programs)}.txt"
        program = self.start(node, [sys.executable, "-m", "raycap", *words], log)
        try:
            if meanwhile is not None:
                meanwhile(log)
            code = program.wait(TIMEOUT_S)
        finally:
            if program.poll() is None:
                self.kill(program)
        assert code == exit_code, log.read_text()[-6000:]
        return log.read_text()

    def _start_node(self, options: Sequence[str], cpus: int) -> subprocess.Popen[bytes]:
        node = self._start(node_command(self.folder, str(len(self.nodes)), cpus, options), self.log(), {})
        self.nodes.append(node)
        return node

    def _start(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = self._environment() | dict(variables)
        with log.open("wb") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=self.folder)

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


def processes(node: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
    """The processes of a node with this word in their title."""
    return [child for child in psutil.Process(node.pid).children(recursive=True) if title in " ".join(child.cmdline())]


def wait_until(log: Path, is_reached: Callable[[str], object]) -> None:
    """Waits until a condition holds for the text of a log."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_reached(log.read_text()):
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)


@contextmanager
def ray_cluster(
    token: str | None = None,
    cpus: int = 1,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """A cluster with only a head. The test is skipped where processes cannot have private disks."""
    if not can_mount():
        pytest.skip("no mount namespaces here (`unshare -m` needs root), so nodes would share a disk")
    cluster = Cluster(token, cpus, variables)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()


@contextmanager
def worker_cluster(count: int = 2, options: Sequence[str] = (), **variables: str) -> Iterator[Cluster]:
    """A cluster of a head without CPUs and `count` workers with one CPU each, whose programs import this checkout."""
    with ray_cluster(cpus=0, variables={"PYTHONPATH": str(ROOT)} | variables) as cluster:
        cluster.join_nodes(count, options=options)
        yield cluster
