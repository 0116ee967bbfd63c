"""Folders of runs on S3, in which others may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.runs import empty_run


@pytest.mark.parametrize("token", ["../../victim", "/victim", "..", "a/b", "a\nb"])
def test_a_token_cannot_choose_the_folder_of_a_copy(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    home = StoragePath(f"s3://data/tokens/{tmp_path.name}/runs/demo-1", StorageOptions(s3))
    (home / "log/driver_token").write_bytes(token.encode())
    with pytest.raises(UserError, match="driver_token is .*, not a token"):
        empty_run(tmp_path / "storage" / "runs" / "demo-1", home).on_worker()
    assert not list(tmp_path.rglob("driver_token"))
