"""`raycap sync` of a storage in which others may write."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raycap.jobs.sync import sync
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config


@pytest.mark.parametrize("name", ["demo-a/../../../../../victim", "/{tmp}/demo-a", "../demo-a"])
def test_a_run_with_another_place_in_its_name_is_left_out(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    storage = f"s3://data/sync/{tmp_path.name}"
    StoragePath(f"{storage}/runs/{name.format(tmp=tmp_path)}/run.json", StorageOptions(s3)).write_bytes(b"{}")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config({"uri": storage, "endpoint_url": s3})))
    with pytest.raises(UserError, match="contains no run"):
        sync(config)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.yaml", "cache"} and not list(tmp_path.rglob("run.json"))
