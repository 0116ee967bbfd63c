"""No credential appears in what a run writes, prints or sends: each is marked, and everything is searched."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jobs.cli import main
from pipeline.storage.path import StorageOptions, StoragePath
from pipeline.tracking.mlflow_client import without_secrets
from tests.conftest import ROOT, small_config
from tests.support.mlflow_server import MlflowServer
from tests.support.s3_server import s3_server

MARKS = {
    "AWS_ACCESS_KEY_ID": "AKIAMARKEDKEY0001",
    "AWS_SECRET_ACCESS_KEY": "marked-secret-key-0002",
    "AWS_SESSION_TOKEN": "marked-session-token-0003",
    "RAY_AUTH_TOKEN": "marked-ray-token-0004-marked-ray-token-0004",
}
USER, PASSWORD = "marked-user-0005", "marked-password-0006"
LOGIN = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = [*MARKS.values(), USER, PASSWORD, LOGIN, "marked-query-0007"]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="r-"))  # short: Ray's sockets lie below it
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def search(where: str, data: bytes) -> list[str]:
    return [f"{where} holds {secret}" for secret in SECRETS if secret.encode() in data]


def search_folder(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files, folder
    return [found for path in files for found in search(str(path), path.read_bytes())]


@pytest.mark.proof
@pytest.mark.ray
def test_marked_credentials_are_found_nowhere(tmp_path: Path, ray_folder: Path) -> None:
    """A run on S3 while the tracker is down, whose errors are printed; then `raycap sync` to the tracker."""
    server = MlflowServer(tmp_path / "mlflow")
    address = server.url.replace("http://", f"http://{USER}:{PASSWORD}@")
    with s3_server() as s3:
        settings = small_config({"uri": "s3://data/secret", "endpoint_url": s3})
        settings["tracking"] = {"enabled": True, "uri": "${TRACKER}"}
        config = tmp_path / "run.yaml"
        config.write_text(yaml.safe_dump(settings))
        environment = {**os.environ, **MARKS, "TRACKER": address, "PYTHONPATH": str(ROOT)}
        environment |= {"RAYCAP_CACHE": str(tmp_path / "cache"), "RAY_TMPDIR": str(ray_folder)}
        environment |= {"RAY_AUTH_MODE": "token", "AWS_DEFAULT_REGION": "us-east-1"}

        def raycap(command: str) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, "-m", "jobs", command, str(config)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
            )
            return done.returncode, done.stdout

        code, output = raycap("run")
        assert code == 0 and "raycap sync CONFIG" in output, output
        try:
            server.start()
            code, sent = raycap("sync")
            assert code == 0 and "FINISHED, model demo/1" in sent, sent
        finally:
            server.kill()
        found = search("the output", (output + sent).encode())
        for folder in (tmp_path / "cache", tmp_path / "mlflow", ray_folder):
            found += search_folder(folder)
        storage = StoragePath("s3://data/secret", StorageOptions(s3))
        names = storage.list()
        assert any(name.endswith("report.html") for name in names)
        for name in names:
            found += search(name, (storage / name).read_bytes())
    assert not found, "\n".join(found)
    assert server.url.removeprefix("http://") in sent, "the address itself is said"


def test_addresses_are_shown_without_what_stands_before_the_host() -> None:
    text = f"API request to http://{USER}:{PASSWORD}@host:5000/api failed; postgresql://{USER}:{PASSWORD}@db@pg/x too"
    assert without_secrets(text) == "API request to http://host:5000/api failed; postgresql://pg/x too"


def test_a_password_in_the_address_of_the_storage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be stored with the configuration, and S3 does not read it."""
    settings = small_config({"uri": "s3://data/x", "endpoint_url": f"http://{USER}:{PASSWORD}@127.0.0.1:1"})
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert main(["run", str(config)]) == 2
    message = capsys.readouterr().err
    assert "storage.endpoint_url" in message and "AWS_ACCESS_KEY_ID" in message
    assert not search("the message", message.encode())


def test_keys_do_not_belong_in_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = {"uri": "s3://data/x", "secret_access_key": MARKS["AWS_SECRET_ACCESS_KEY"]}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config(storage)))
    assert main(["run", str(config)]) == 2
    message = capsys.readouterr().err
    assert "unknown key storage.secret_access_key" in message
    assert not search("the message", message.encode())
