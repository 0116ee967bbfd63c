"""MLflow's own server for tests, on the loopback: killed and started again on the same port; and one that is silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.ray_cluster import free_port


class MlflowServer:
    """A server whose data stay when it ends. store: a database's URI. artifacts: a folder or an s3:// prefix."""

    def __init__(self, folder: Path, store: str | None = None, artifacts: str | None = None) -> None:
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.store, self.log = store or f"sqlite:///{folder / 'server.db'}", folder / "server.log"
        self.artifacts = artifacts or str(folder / "artifacts")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self.store, "--artifacts-destination", self.artifacts]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment = {**os.environ, **quiet}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + 240
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9 of the server and its workers."""
        if self.process is not None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While the server is dead, makes its port accept connections and never answer."""
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", self.port))
            listening.listen(64)
            held: list[socket.socket] = []
            thread = threading.Thread(target=_accept, args=(listening, held), daemon=True)
            thread.start()
            yield
            listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


def _accept(listening: socket.socket, held: list[socket.socket]) -> None:
    while True:
        try:
            held.append(listening.accept()[0])
        except OSError:
            return


@contextmanager
def mlflow_server(folder: Path, store: str | None = None, artifacts: str | None = None) -> Iterator[MlflowServer]:
    """A running server, which is killed at the end."""
    server = MlflowServer(folder, store, artifacts)
    try:
        server.start()
        yield server
    finally:
        server.kill()
