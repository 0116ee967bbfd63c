"""Where MLflow's files are if the tracker is a database, and when they are lost with a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.tracking.mlflow_client import (
    artifact_location,
    experiment_of,
    public_uri,
    tracking_client,
    warn_of_local_file,
)
from tests.conftest import small_config


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (None, "storage/mlflow"),
        ("sqlite:///{here}/other/tracker.v2.db", "other/tracker.v2"),
        ("sqlite+pysqlite:///{here}/tracker?timeout=5", "tracker-artifacts"),
        ("sqlite:///tracker.db", "tracker"),
        ("postgresql://user:secret@localhost/tracker", "storage/mlflow"),
        ("mysql+pymysql://user:secret@localhost/tracker", "storage/mlflow"),
        ("http://localhost:5000", None),
        ("sqlite://", None),
        ("file:///tmp/tracker", None),
    ],
)
def test_artifacts_lie_beside_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    tracking = {"uri": None if uri is None else uri.format(here=tmp_path)}
    found = artifact_location(parse_config(small_config(tmp_path / "storage", tracking=tracking)))
    assert found == (None if expected is None else (tmp_path / expected).as_uri())


@pytest.mark.parametrize("name", ["why?not=1", "100%20 #;&"])
def test_the_database_is_in_a_storage_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    config = parse_config(small_config(tmp_path / name))
    client = tracking_client(config)
    run = client.create_run(experiment_of(client, config))
    client.log_text(run.info.run_id, "text", "a.txt")
    files = {path.name for path in (tmp_path / name).rglob("*") if path.is_file()}
    assert {"mlflow.db", "a.txt"} <= files and [path.name for path in tmp_path.iterdir()] == [name]
    assert public_uri(config).endswith("/mlflow.db")


def test_a_link_folder_or_device_in_the_place_of_the_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "other.db")
    with pytest.raises(UserError, match="is a link"):
        tracking_client(parse_config(small_config(tmp_path, tracking={"enabled": True})))
    for other in (tmp_path, Path("/dev/null")):
        with pytest.raises(UserError, match=f"^{other} is not a regular file; set tracking.uri"):
            tracking_client(parse_config(small_config(tmp_path, tracking={"uri": f"sqlite:///{other}"})))
    assert not (tmp_path / "other.db").exists()


def test_artifacts_of_a_database_go_to_s3_with_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    """The endpoint is that of the storage, whatever the environment names."""
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("mlflow.MlflowClient", lambda uri: uri)
    uri = "postgresql://user:secret@localhost/tracker"
    storage = {"uri": f"s3://data/{tmp_path.name}", "endpoint_url": s3}
    config = parse_config(small_config(storage, tracking={"uri": uri}))
    assert tracking_client(config) == uri and artifact_location(config) == f"s3://data/{tmp_path.name}/mlflow"
    (tmp_path / "report.html").write_text("<p>report</p>")
    get_artifact_repository(str(artifact_location(config))).log_artifact(str(tmp_path / "report.html"))
    assert (config.storage_place / "mlflow/report.html").read_bytes() == b"<p>report</p>"


@pytest.mark.parametrize(
    ("uri", "public"),
    [
        (" http://me:secret-word@host:1 ", "http://host:1"),
        ("http://host:1/x;password=secret-word", "http://host:1/x"),
        ("http://host/#token=secret-word", "http://host/"),
        ("postgresql://me:secret#word@host/db?password=secret-word", "postgresql://host/db"),
        ("sqlite:////a@b/mlflow.db", "sqlite:////a@b/mlflow.db"),
        ("results@v2/mlruns", "results@v2/mlruns"),
        ("http://mlflow.example.com/@team", "http://mlflow.example.com/@team"),
        ("https://mlflow.example.com/?user=me@x.org", "https://mlflow.example.com/"),
    ],
)
def test_what_is_stored_of_the_address(tmp_path: Path, uri: str, public: str) -> None:
    config = parse_config(small_config(tmp_path, tracking={"uri": uri}))
    assert public_uri(config) == public and "secret" not in repr(config)


def test_a_file_that_is_lost_with_its_machine(tmp_path: Path, log_lines: list[str]) -> None:
    """A storage on S3 outlives the machine, and MLflow's default file does not."""
    for storage, tracking in (
        (tmp_path, {"enabled": True}),
        ("s3://data/x", {"enabled": False}),
        ("s3://data/x", {"uri": "http://127.0.0.1:5000"}),
    ):
        warn_of_local_file(parse_config(small_config({"uri": str(storage)}, tracking=tracking)))
    assert not log_lines
    warn_of_local_file(parse_config(small_config({"uri": "s3://data/x"}, tracking={"enabled": True})))
    (warning,) = log_lines
    assert "MLflow's data are only on this machine, in sqlite:///" in warning and "set tracking.uri" in warning
