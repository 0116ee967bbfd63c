"""No credential appears in what a run writes, prints or sends: each is marked, and everything is searched."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT, small_config
from tests.support.jobs_server import Stub
from tests.support.mlflow_server import MlflowServer
from tests.support.s3_server import s3_server

MARKS = {
    "AWS_ACCESS_KEY_ID": "AKIAMARKEDKEY0001",
    "AWS_SECRET_ACCESS_KEY": "marked-secret-key-0002",
    "AWS_SESSION_TOKEN": "marked-session-token-0003",
    "RAY_AUTH_TOKEN": "marked-ray-token-0004-marked-ray-token-0004",
    "MLFLOW_TRACKING_TOKEN": "marked-mlflow-token-0008",
}
EXPERIMENT, WORDS = "marked-experiment-0009", "marked-words-0010"  # the tracker's database has the first
USER, PASSWORD = "marked-user-0005", "marked-password-0006"
LOGIN = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = [*MARKS.values(), USER, PASSWORD, LOGIN, "marked-query-0007", WORDS]


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


def tracked_parameters(folder: Path) -> dict[str, str]:
    """The parameters in the database of a tracker's folder."""
    with sqlite3.connect(folder / "server.db") as database:
        return dict(database.execute("SELECT key, value FROM params"))


@pytest.mark.proof
@pytest.mark.ray
def test_marked_credentials_are_found_nowhere(tmp_path: Path, ray_folder: Path) -> None:
    """A run on S3 while the tracker is down, whose errors are printed; then `raycap sync` to the tracker."""
    words = tmp_path / f"{WORDS}.txt"
    words.write_text("zebra\n")
    server = MlflowServer(tmp_path / "mlflow")
    address = server.url.replace("http://", f"http://{USER}:{PASSWORD}@")
    with s3_server() as s3:
        settings = small_config({"uri": "s3://data/secret", "endpoint_url": "${ENDPOINT}"})
        settings["tracking"] = {"enabled": True, "uri": "${TRACKER}", "experiment": "${EXPERIMENT}"}
        settings["data"]["extra_vocabulary"] = "${WORDS}"
        config = tmp_path / "run.yaml"
        config.write_text(yaml.safe_dump(settings))
        environment = {**os.environ, **MARKS, "TRACKER": address, "PYTHONPATH": str(ROOT)}
        environment |= {"EXPERIMENT": EXPERIMENT, "WORDS": str(words), "ENDPOINT": s3}
        environment |= {"RAYCAP_CACHE": str(tmp_path / "cache"), "RAY_TMPDIR": str(ray_folder)}
        environment |= {"RAY_AUTH_MODE": "token", "AWS_DEFAULT_REGION": "us-east-1"}

        def raycap(command: str) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, "-m", "raycap", command, str(config)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
            )
            return done.returncode, done.stdout

        _, checked = raycap("doctor")
        assert "does not answer" in checked, checked
        code, output = raycap("run")
        assert code == 0 and "raycap sync CONFIG" in output, output
        try:
            server.start()
            code, sent = raycap("sync")
            assert code == 0 and "FINISHED, model demo/1" in sent, sent
        finally:
            server.kill()
        said = checked + output + sent
        found = search("the output", said.encode())
        assert EXPERIMENT not in said
        for folder in (tmp_path / "cache", tmp_path / "mlflow", ray_folder):
            found += search_folder(folder)
        storage = StoragePath("s3://data/secret", StorageOptions(s3))
        names = storage.list()
        assert any(name.endswith("report.html") for name in names)
        for name in names:
            data = (storage / name).read_bytes()
            found += search(name, data)
            assert EXPERIMENT.encode() not in data, name
        parameters = tracked_parameters(tmp_path / "mlflow")
    assert not found, "\n".join(found)
    assert parameters["tracking.experiment"] == "${EXPERIMENT}"
    assert parameters["data.extra_vocabulary"] == "${WORDS}" and parameters["storage.endpoint_url"] == "${ENDPOINT}"
    assert server.url.removeprefix("http://") in sent, "the address itself is said"


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


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> Stub:
    """A jobs server, and the marked credentials in the environment."""
    for name, value in MARKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return stub


def submit(server: Stub, config: Path, *words: str) -> int:
    return main(["submit", "run", str(config), "--address", server.address, "--detach", *words])


def test_a_submission_sends_no_secret(tmp_path: Path, marked: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code, the configuration, the job's metadata, its command and its environment contain references only."""
    settings = small_config("s3://data/x")
    settings["tracking"] = {"uri": "${TRACKER}", "experiment": "${EXPERIMENT}"}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    for name in ("id_rsa", ".env"):
        (tmp_path / name).write_text(PASSWORD)
    monkeypatch.setenv("TRACKER", f"http://{USER}:{PASSWORD}@host")
    monkeypatch.setenv("EXPERIMENT", WORDS)
    words = ["--secret", "TRACKER", "--secret", "EXPERIMENT", "--env", "NCCL_DEBUG=INFO", "--detach"]
    command = [sys.executable, "-m", "raycap", "submit", "run", str(config), "--address", marked.address, *words]
    output = subprocess.run(command, capture_output=True, text=True)  # Ray reads the kind of token when it is imported
    assert output.returncode == 0, output.stderr
    paths, tokens, bodies = zip(*marked.received, strict=True)
    assert set(tokens) == {f"Bearer {MARKS['RAY_AUTH_TOKEN']}"}
    (package,) = [body for body in bodies if body[:2] == b"PK"]
    (job,) = [json.loads(body) for path, body in zip(paths, bodies, strict=True) if path == "POST /api/jobs/"]
    assert (
        job["runtime_env"]["env_vars"] == {"NCCL_DEBUG": "INFO", "RAY_JOB_STOP_WAIT_TIME_S": "90"}
        and "TRACKER:?" in job["entrypoint"]
    )
    found = search("the output", (output.stdout + output.stderr).encode())
    for path, body in zip(paths, bodies, strict=True):
        found += search(path, path.encode() + body)
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        assert "submitted/run.yaml" in archive.namelist()
        for name in archive.namelist():
            found += search(name, archive.read(name))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "words",
    [
        ["--env", "MLFLOW_TRACKING_TOKEN"],
        ["--env", f"SERVER=http://{USER}:{PASSWORD}@host"],
        ["--set", f"tracking.uri=https://{PASSWORD}@host"],
    ],
)
def test_a_submission_with_a_secret_is_refused_before_anything_is_sent(
    words: list[str], tmp_path: Path, marked: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config("s3://data/x")))
    assert submit(marked, config, *words) == 2
    output = capsys.readouterr()
    assert not marked.received and "--secret" in output.err
    assert not search("the message", (output.out + output.err).encode())
