"""Versity's S3 gateway in front of a local folder: a server of another make than `tests.support.s3_server`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectionError

from tests.support.ray_cluster import ADDRESS, free_port
from tests.support.s3_server import CREDENTIALS

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUCKET = "data"
START_S = 30


def build_gateway(folder: Path) -> Path:
    """Compiles the gateway, which takes minutes the first time. Skips the test without Go or the module."""
    if shutil.which("go") is None:
        pytest.skip("no Go on the PATH")
    environment = os.environ | {"GOBIN": str(folder)}
    done = subprocess.run(["go", "install", MODULE], env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{MODULE} cannot be built: {done.stderr.strip().splitlines()[-1]}")
    return folder / "versitygw"


@contextmanager
def versity_server(program: Path, folder: Path) -> Iterator[str]:
    """Serves an empty bucket `data`, stored below `folder`, with `CREDENTIALS`. Yields the endpoint's URL."""
    address = f"{ADDRESS}:{free_port()}"
    for name in ("objects", "metadata"):
        (folder / name).mkdir()
    keys = ["--access", CREDENTIALS["AWS_ACCESS_KEY_ID"], "--secret", CREDENTIALS["AWS_SECRET_ACCESS_KEY"]]
    store = ["posix", "--sidecar", str(folder / "metadata"), str(folder / "objects")]  # needs no extended attributes
    with (folder / "server.txt").open("wb") as log:
        server = subprocess.Popen([str(program), *keys, "--port", address, "--quiet", *store], stdout=log, stderr=log)
    try:
        _make_bucket(f"http://{address}", server, folder / "server.txt")
        yield f"http://{address}"
    finally:
        server.kill()
        server.wait()


def _make_bucket(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Makes the bucket once the server answers."""
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except (ConnectionError, ClientError):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
