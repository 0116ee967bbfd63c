"""Where a tracker that is a database, not a server, has its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import parse_config
from pipeline.tracking.mlflow_client import artifact_location
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
