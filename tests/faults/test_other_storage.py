"""A run, a search and retrainings on an S3 server of another make than the one of the other tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raycap.pipeline.storage.path import StoragePath, try_rights
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import ROOT, small_config
from tests.support.s3_server import CREDENTIALS
from tests.support.versity_server import BUCKET, build_gateway, versity_server

TIMEOUT_S = 900
pytestmark = [pytest.mark.proof, pytest.mark.ray]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    program = build_gateway(tmp_path)
    with versity_server(program, tmp_path) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        yield url


def raycap(tmp_path: Path, *words: str) -> str:
    """The output of a command that must succeed. Each has a cache of its own, so that it reads the storage."""
    variables = [f"RAYCAP_CACHE={tmp_path / 'caches' / words[0]}", f"PYTHONPATH={ROOT}"]
    command = ["env", *variables, sys.executable, "-m", "raycap", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def test_commands_on_another_s3_server(tmp_path: Path, url: str) -> None:
    place = StoragePath(f"s3://{BUCKET}/results", StorageOptions(url))
    try_rights(place)
    values = small_config({"uri": place.uri, "endpoint_url": url}) | {"name": "other"}
    values["stages"] = values["stages"][:2]
    run, search = tmp_path / "run.yaml", tmp_path / "search.yaml"
    run.write_text(yaml.safe_dump(values))
    space = {"model.dynamic_expansion": [1, 2]}
    trials = {"name": "trials", "base": "run.yaml", "backbone": {"weights": "base"}, "algorithm": "grid"}
    search.write_text(yaml.safe_dump(trials | {"trial": {"stages": ["xe_frozen"]}, "space": space}))
    assert "images)" in raycap(tmp_path, "run", str(run))
    assert "is complete" in raycap(tmp_path, "run", str(run))
    output = raycap(tmp_path, "tune", str(search))
    assert "finished" in output and "failed" not in output
    assert "decision  first" in raycap(tmp_path, "retrain", str(run))
    assert "the champion stays" in raycap(tmp_path, "retrain", str(run))
    assert any(name.endswith("COMPLETE") or name.endswith("COMPLETE.json") for name in place.list())
