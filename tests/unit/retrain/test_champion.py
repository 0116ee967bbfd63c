"""champion.json, which others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.retrain.champion import ChampionStore
from pipeline.storage.path import storage_path

BUNDLE = {"bundle": "models/demo/champion-t000001", "files": {"model.safetensors": "0"}, "run_id": "demo-1"}
FILE = {"name": "snapshots/t000001.parquet", "sha256": "0"}


@pytest.mark.parametrize(
    "change",
    [
        {"champion": BUNDLE | {"bundle": "../../elsewhere"}},
        {"champion": BUNDLE | {"files": {"/etc/passwd": "0"}}},
        {"before": [BUNDLE | {"bundle": "/elsewhere"}]},
        {"snapshot": FILE | {"name": "a/../../b"}},
    ],
)
def test_a_name_that_leads_out_of_the_storage_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    store = ChampionStore(storage_path(tmp_path), "demo")
    state = {"champion": BUNDLE, "before": [BUNDLE], "snapshot": FILE}
    path = tmp_path / "retrain" / "demo" / "champion.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(state))
    assert store.read().champion is not None
    path.write_text(json.dumps(state | change))
    with pytest.raises(UserError, match=r"is not a champion's file \(.*is not a plain relative path"):
        store.read()
