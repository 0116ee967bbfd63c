"""champion.json, which others may have written, and changes below the data root."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.errors import UserError
from raycap.pipeline.retrain.champion import (
    LISTING,
    BundleRecord,
    ChampionState,
    ChampionStore,
    Change,
    compare,
    list_data,
    new_keys,
    with_keys,
)
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.tables import from_bytes, to_bytes
from tests.conftest import small_config

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


def listed(root: Path, storage: Path) -> pa.Table:
    config = parse_config(small_config(storage, data={"root": str(root), "train_splits": ["train"]}))
    return list_data(config, str(root))


def write(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_changes_are_counted_without_reading_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "set"
    write(root, ["dataset.json", *(f"images/{number}.png" for number in range(90))])
    monkeypatch.setattr(StoragePath, "read_bytes", lambda self, *limit: pytest.fail(f"{self} was read"))
    before = listed(root, tmp_path / "results")
    assert before.num_rows == 91 and before.schema == LISTING
    assert compare(before, None) == Change(added=91, changed=0, gone=0)
    assert compare(before, before) == Change(added=0, changed=0, gone=0)
    (root / "images/7.png").write_text("longer than it was")
    os.utime(root / "images/8.png", ns=(1, 1))
    (root / "images/9.png").unlink()
    write(root, ["images/new.png", "images/.new.png.tmp", ".cache/x"])
    now = listed(root, tmp_path / "results")
    assert compare(now, from_bytes(to_bytes(before), LISTING)) == Change(added=1, changed=2, gone=1)
    assert str(compare(now, before)) == "1 new, 2 changed, 1 gone"


def test_results_below_the_data_root_are_not_listed(tmp_path: Path) -> None:
    write(tmp_path, ["a.png", "results/runs/b.png", "results-of-others/c.png"])
    uris = listed(tmp_path, tmp_path / "results")["uri"].to_pylist()
    assert sorted(uris) == [f"{tmp_path}/a.png", f"{tmp_path}/results-of-others/c.png"]


def test_new_images_are_new_content_not_new_names(tmp_path: Path) -> None:
    """This includes images in an archive, although a listing shows only the archive."""
    root = tmp_path / "set"
    write(root, ["a.tar", "b.png"])
    uris = [f"tar:{512 * n}+9+{len(str(root)) + 6}:{root}/a.tar/{n}.jpg" for n in range(3)] + [f"{root}/b.png"]
    rows = [range(4), ["train"] * 4, uris, [["A."]] * 4, ["k0", "k1", "k2", "k3"]]
    dataset = Dataset(pa.table([pa.array(row, field.type) for row, field in zip(rows, SCHEMA, strict=True)], SCHEMA))
    listing = listed(root, tmp_path / "results")
    snapshot = from_bytes(to_bytes(with_keys(listing, dataset)), LISTING)
    assert compare(listing, snapshot) == Change(added=0, changed=0, gone=0)
    assert new_keys(dataset, None) == 4 and new_keys(dataset, snapshot) == 0
    (root / "a.tar").write_text("replaced")
    assert compare(listed(root, tmp_path / "results"), snapshot) == Change(added=0, changed=1, gone=0)
    assert new_keys(dataset.with_column("key", pa.array(["k0", "k1", "new", "k3"])), snapshot) == 1
