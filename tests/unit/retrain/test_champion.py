"""champion.json, which others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.retrain.champion import BundleRecord, ChampionState, ChampionStore
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import storage_path

BUNDLE = {"bundle": "models/demo/champion-t000001", "files": {"model.safetensors": "0"}, "run_id": "demo-1"}


@pytest.mark.parametrize(
    "change",
    [
        {"champion": BUNDLE | {"bundle": "../../elsewhere"}},
        {"champion": BUNDLE | {"files": {"/etc/passwd": "0"}}},
        {"before": [BUNDLE | {"bundle": "/elsewhere"}]},
        {"snapshot": "a/../../b"},
    ],
)
def test_a_name_that_leads_out_of_the_storage_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    store = ChampionStore(storage_path(tmp_path), "demo")
    snapshot = "snapshots/t000001.parquet"
    state = {"champion": BUNDLE, "before": [BUNDLE], "snapshot": snapshot, "number": 1, "decided": 1}
    path = tmp_path / "retrain" / "demo" / "champion.json"
    path.parent.mkdir(parents=True)
    assert ChampionState.model_validate_json(json.dumps(state)).champion is not None
    path.write_text(json.dumps(state | change))
    with pytest.raises(UserError, match=r"is not a champion's file \(.*is not a plain relative path"):
        store.read()


def leased(store: ChampionStore) -> Lease:
    lease = take_lease(store.folder / "lease.json", 30, by_force=True)
    assert isinstance(lease, Lease)
    return lease


def test_a_bundle_that_has_changed_does_not_become_champion(tmp_path: Path) -> None:
    store = ChampionStore(storage_path(tmp_path), "demo")
    (tmp_path / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(OSError, match="has changed since it was compared"):
        store.copy_bundle(tmp_path, BundleRecord.model_validate(BUNDLE), leased(store))


def test_only_files_of_no_decision_are_deleted(tmp_path: Path) -> None:
    """The configuration's name looks like a token."""
    store = ChampionStore(storage_path(tmp_path), "coco-t000009")
    lease = leased(store)
    state = store.fence(lease)
    bundle = f"models/{store.name}/champion-t000001"
    (store.storage / f"{bundle}/model.safetensors").write_bytes(b"weights")
    (store.storage / f"models/{store.name}/coco-t000009-1a/model.safetensors").write_bytes(b"of a run")
    (store.folder / "decisions/000001-t000001.html").write_bytes(b"page")
    update = {
        "decision": store.write_file("decisions/000001-t000001.json", b"{}", lease),
        "snapshot": store.write_file("snapshots/t000001.parquet", b"listing", lease),
        "held_out": store.write_file("held-out/t000001.parquet", b"images", lease),
        "champion": BundleRecord(bundle=bundle, files={"model.safetensors": "0"}, run_id="demo-1"),
        "number": 1,
        "decided": 1,
    }
    store.commit(state.model_copy(update=update), lease)
    later = {f"retrain/{store.name}/snapshots/t000002.parquet", f"models/{store.name}/champion-t000002/model"}
    for name in later:
        (store.storage / name).write_bytes(b"of a killed process")
    before = set(store.storage.list())
    leased(store)
    lease = leased(store)
    assert lease.token == 3
    store.remove_orphans(store.read(), lease)
    assert before - set(store.storage.list()) == later
    lease.check()
