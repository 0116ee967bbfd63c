"""The cluster of infra/compose.yaml, with commands from outside of it.

Needs Docker with Compose and the images that the file names; IMAGE, STORE_IMAGE and POSTGRES_IMAGE name other ones.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.ray_cluster import TIMEOUT_S

IMAGE = os.environ.get("IMAGE", "raycap:0.1.0")
COMPOSE = ["docker", "compose", "--file", str(ROOT / "infra" / "compose.yaml")]
DASHBOARD, SERVER, STORE, TRACKER = (f"http://127.0.0.1:{port}" for port in (8265, 8000, 9000, 5000))
# The workers' disks are small, so that a test can fill one.
SMALL_DISKS = """
services:
  worker:
    volumes: !override []
    tmpfs: ["/cache:size=64m,uid=1000", "/home/raycap:uid=1000", "/tmp:size=1g,mode=1777"]
"""


def docker(*words: str) -> str:
    """The output of `docker WORDS`, which must succeed."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Containers:
    """Started by `docker compose up`, with random tokens and passwords."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        (folder / "disks.yaml").write_text(SMALL_DISKS)
        password = secrets.token_hex(16)
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAYCAP_SERVE_TOKEN": self.token,
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "STORE_USER": "raycap",
            "STORE_PASSWORD": password,
            "AWS_ENDPOINT_URL": STORE,
            "AWS_ACCESS_KEY_ID": "raycap",
            "AWS_SECRET_ACCESS_KEY": password,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def compose(self, *words: str) -> str:
        """The output of `docker compose WORDS`, which must succeed."""
        command = [*COMPOSE, "--file", str(self.folder / "disks.yaml"), *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Starts `raycap WORDS` on this machine, outside of the cluster; returns its log, too."""
        log = self.folder / f"{secrets.token_hex(4)}.txt"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "raycap", *words]
            return subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=output, stderr=output), log

    def submit(self, *words: str, meanwhile: Callable[[Path], object] | None = None) -> tuple[int, str]:
        """The exit code and the output of `raycap submit WORDS`. meanwhile: called with the log while it runs."""
        started = time.monotonic()
        program, log = self.start("submit", *words, "--address", DASHBOARD)
        try:
            if meanwhile is not None:
                meanwhile(log)
            code = program.wait(TIMEOUT_S)
        finally:
            program.kill()
        print(f"submit {words[0]}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
        return code, log.read_text()

    def write(self, name: str, values: dict[str, Any]) -> str:
        (self.folder / name).write_text(yaml.safe_dump(values))
        return str(self.folder / name)


@contextmanager
def containers(folder: Path) -> Iterator[Containers]:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no Docker with Compose here")
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"no image {IMAGE} here, which `make image` builds")
    cluster = Containers(folder)
    try:
        cluster.compose("up", "--detach", "--wait")
        yield cluster
    finally:
        cluster.compose("down", "--volumes", "--timeout", "10")
