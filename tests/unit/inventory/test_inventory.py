"""What is found in a storage, and what of it can be removed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raycap.jobs.runs import Content, plan_removals, read_contents, remove
from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.lease import Lease, take_lease
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.runs import Killed
from tests.support.storages import FakeStorage

Wait = Callable[[float], None]


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> FakeStorage:
    if request.param == "disk":
        return FakeStorage(storage_path(tmp_path / "results"))
    return FakeStorage(
        StoragePath(f"s3://data/inventory/{tmp_path.name}", StorageOptions(request.getfixturevalue("s3")))
    )


@pytest.fixture
def local(tmp_path: Path) -> FakeStorage:
    return FakeStorage(storage_path(tmp_path / "results"))


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Lets days pass."""
    now, days = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + 86400 * days[0])

    def pass_days(count: float) -> None:
        days[0] += count

    return pass_days


def run_of(storage: FakeStorage, name: str = "demo-1") -> Content:
    return next(run for run in read_contents(storage.place)["runs"] if run.name == name)


def plan(storage: FakeStorage) -> set[str]:
    """The paths of what can be removed."""
    return {store.path for store in plan_removals(storage.place, read_contents(storage.place))[0]}


def kept(storage: FakeStorage) -> str:
    return plan_removals(storage.place, read_contents(storage.place))[1]


def remove_all(storage: FakeStorage) -> None:
    for path in plan(storage):
        remove(storage.place / path)


def test_everything_is_listed_and_nothing_written(storage: FakeStorage, wait: Wait) -> None:
    assert not any(read_contents(storage.place).values()) and not plan(storage)
    storage.run("demo-1")
    storage.run("demo-2", 1, complete=False)
    storage.run("demo-3", 2, complete=False)
    storage.run("demo-trial", 0, complete=False)
    storage.search("s-1", **{"demo-trial": "stopped", "demo-gone": "running"})
    storage.champion("demo", "demo-1")
    storage.features("f1", "demo-1 backbone")
    before, listed = storage.names(), storage.place.list()
    wait(2 / 24)
    found = read_contents(storage.place)
    assert storage.names() == before
    keys = ("created", "at", "val", "test")
    assert {run.name: (run.state, *(run.facts[key] for key in keys)) for run in found["runs"]} == {
        "demo-1": ("complete", "2026-01-02T03:04", "", 1.25, 1.5),
        "demo-2": ("interrupted", "2026-01-02T03:04", "scst", 0.5, None),
        "demo-3": ("interrupted", "2026-01-02T03:04", "evaluation", 1.5, None),
        "demo-trial": ("interrupted", "2026-01-02T03:04", "xe", None, None),
    }
    (search,), (champion,), (store,) = found["searches"], found["retrain"], found["features"]
    assert (search.name, search.facts, search.state) == ("s-1", {"trials": "1/2"}, "")
    assert (champion.facts["run"], champion.state) == ("demo-1", "")
    assert champion.facts["bundle"] in [bundle.path for bundle in found["models"]]
    assert (store.name, store.facts) == ("f1", {"images": 7})
    locks = sum(entry.size for name, entry in listed.items() if name.endswith(".lock"))
    sizes = [entry.bytes for entries in found.values() for entry in entries]
    assert sum(sizes) == sum(entry.size for entry in listed.values()) - locks


def test_a_run_in_progress(storage: FakeStorage, wait: Wait) -> None:
    storage.run("demo-1", 1, complete=False)
    if storage.place.is_remote:
        assert run_of(storage).state == "in progress", "it has just been written"
        wait(2 / 24)
        lease = take_lease(storage.place / "runs/demo-1.lease.json", 30)
        assert isinstance(lease, Lease)
        with lease:
            assert run_of(storage).state == "in progress"
    else:
        folder = storage.place.path / "runs/demo-1"
        with try_lock(folder) as has_lock:
            assert has_lock and run_of(storage).state == "in progress"
    assert run_of(storage).state == "interrupted"


def test_foreign_files_are_never_touched(local: FakeStorage, wait: Wait) -> None:
    for name in ("runs/notes.txt", "runs/other/photo.jpg", "runs/mine/config.yaml", "runs/mine/thesis.tex", "x/y"):
        local.write(name, b"1")
    local.write("models/readme", b"1")
    local.write("retrain/x/y/z", b"1")
    local.write("features/mine/1.npy", b"1")
    wait(100)
    found = read_contents(local.place)["runs"]
    assert {run.name: run.state for run in found} == {"mine": "unprepared", "other": "unprepared"}
    assert not plan(local) and not kept(local)


def test_what_can_be_removed(storage: FakeStorage, wait: Wait) -> None:
    storage.run("demo-1")
    storage.run("demo-old", 1, complete=False)
    storage.search("s-1", **{"demo-old": "running"})
    storage.champion("demo", "demo-1")
    for name, backbone in (
        ("f1", "demo-1 backbone"),
        ("f2", "demo-old-xe backbone"),
        ("f3", "of no run"),
        ("f4", None),
    ):
        storage.features(name, backbone)
    wait(0.5)
    assert not plan(storage)
    wait(1)
    found = plan(storage)
    assert found == {"features/f3", "features/f4"}
    before = storage.names()
    remove_all(storage)
    assert before - storage.names() == {
        name for name in before if any(name.startswith(f"{removed}/") for removed in found)
    }
    assert not plan(storage) and read_contents(storage.place)["runs"]


@pytest.mark.parametrize("damage", ["trial", "champion", "no digests"])
def test_what_is_not_known_is_kept(local: FakeStorage, wait: Wait, damage: str) -> None:
    local.run("demo-1", 1, complete=False)
    local.features("f1", "of no run")
    if damage == "trial":
        local.write("searches/s/trials.json", b"[")
    elif damage == "champion":
        local.write("retrain/demo/champion.json", b"{")
    else:
        (local.place / "runs/demo-1/init/digests.json").delete()
    wait(40)
    assert kept(local) and not plan(local)


@pytest.mark.parametrize("count", [1, 4])
def test_a_removal_that_is_killed(
    storage: FakeStorage, wait: Wait, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """What remains is a store without the rows of missing shards; the next removal ends it."""
    delete, left = StoragePath.delete, [count]
    storage.run("demo-1")
    storage.features("f1", "of no run")

    def dying(path: StoragePath) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        delete(path)

    wait(2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(StoragePath, "delete", dying)
        remove_all(storage)
    remaining = [name.split("/") for name in storage.names() if name.startswith("features/f1/")]
    manifests, shards = ({Path(name[-1]).stem for name in remaining if part in name} for part in ("manifest", "shards"))
    assert manifests <= shards and plan(storage) == {"features/f1"}
    remove_all(storage)
    assert not any(name.startswith("features/") for name in storage.names())


def test_links_are_not_followed(tmp_path: Path, wait: Wait) -> None:
    storage, elsewhere = FakeStorage(storage_path(tmp_path / "results")), tmp_path / "elsewhere"
    storage.run("demo-1", 1, complete=False)
    shutil.move(tmp_path / "results/runs/demo-1", elsewhere)
    (tmp_path / "results/runs/demo-1").symlink_to(elsewhere)
    wait(100)
    assert not read_contents(storage.place)["runs"] and not plan(storage)
