"""Folders of runs whose files others may have written, cut or removed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.runs.folder import StageResult
from raycap.pipeline.storage.atomic import write_json
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


def test_a_lost_backbone_of_a_stage_that_trained_it_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    folder = empty_run(tmp_path)
    for stage in folder.config.stages:
        write_json(folder.stage(stage.name) / "DONE.json", asdict(StageResult(2, 1, 0.5, True, "")))
        (folder.stage(stage.name) / "best-1").mkdir()
        (folder.stage(stage.name) / "best-1/model.safetensors").touch()
    (tmp_path / "init").mkdir()
    (tmp_path / "init/backbone.safetensors").touch()
    frozen, trained = folder.config.stages[:2]
    assert not frozen.train_backbone and trained.train_backbone
    assert folder.weights_after(frozen, "backbone") == tmp_path / "init/backbone.safetensors"
    with pytest.raises(DamagedError, match=r"best-1/backbone\.safetensors is missing; restore it"):
        folder.weights_after(trained, "backbone")


def test_an_incomplete_summary_is_damaged(tmp_path: Path) -> None:
    write_json(tmp_path / "COMPLETE.json", {"table": "", "scores": {}})
    with pytest.raises(DamagedError, match=r"COMPLETE\.json is damaged: it has no durations, tracked; remove it"):
        _ = empty_run(tmp_path).summary
