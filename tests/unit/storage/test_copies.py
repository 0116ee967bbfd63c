"""Copies of folders on S3 are removed when they take too much of the disk, and never what S3 does not have."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.atomic import file_lock
from raycap.pipeline.storage.mirror import UNUSED_FOR_S, Mirror, prune_copies
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.runs import empty_run

Make = Callable[..., Mirror]


@pytest.fixture
def make(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    """Makes a copy of 100 bytes that was pushed some hours ago, on a disk with room for one."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=8 * 150))
    monkeypatch.setattr("raycap.pipeline.storage.mirror.PASS_S", 600.0)  # a busy machine may need more than PASS_S

    def copy(name: str, hours: float = 24, place: str = "storage/abc/runs") -> Mirror:
        home = StoragePath(f"s3://data/{request.node.name}/{name}", StorageOptions(s3))
        made = Mirror(home, tmp_path / "cache" / place / name)
        made.local.mkdir(parents=True)
        (made.local / "model").write_bytes(bytes(90))
        (made.local / "COMPLETE.json").write_bytes(bytes(10))
        made.push()
        set_age(made, hours)
        return made

    return copy


def set_age(copy: Mirror, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(copy.record_path, (then, then))


def left(*copies: Mirror) -> list[str]:
    return [copy.local.name for copy in copies if copy.local.is_dir()]


def test_the_copies_used_longest_ago_are_removed(make: Make, tmp_path: Path) -> None:
    """One eighth of the space, what is free and what copies hold, is for copies: here for one and a half of them."""
    middle, old, new = make("middle", 30), make("old", 40, "workers/abc/RUN/token"), make("new", 20, "bundles")
    elsewhere = tmp_path / "cache" / "shards" / "x.npy"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(bytes(1000))
    prune_copies(keep=tmp_path)
    assert left(middle, old, new) == ["new"] and elsewhere.exists()
    old.pull()
    assert (old.local / "model").read_bytes() == bytes(90), "a removed copy is downloaded again"


def test_copies_that_fit_remain(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = make("one"), make("two")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=8 * 300))
    prune_copies(keep=tmp_path)
    assert left(*copies) == ["one", "two"]
    monkeypatch.setenv("RAYCAP_CACHE_GIB", str(8 * 150 / 2**30))
    prune_copies(keep=tmp_path)
    assert left(*copies) == ["two"] or left(*copies) == ["one"], "the volume is smaller than its disk"


def test_a_copy_in_use_remains(make: Make, tmp_path: Path) -> None:
    """In use: needed now, just pulled, or locked by a process, such as a worker that trains."""
    needed, recent, locked, idle = make("needed"), make("recent"), make("locked"), make("idle", 23)
    training = make("training", place="workers/abc/RUN/token")
    set_age(recent, UNUSED_FOR_S / 3600 - 1)
    with try_lock(locked.local) as has_lock, empty_run(training.local, training.home).in_use():
        assert has_lock
        prune_copies(keep=needed.local)
    assert left(needed, recent, locked, training, idle) == ["needed", "recent", "locked", "training"]


def test_nothing_is_removed_that_s3_does_not_have(make: Make, tmp_path: Path) -> None:
    added, changed, deleted, sent = make("added"), make("changed"), make("deleted"), make("sent")
    (added.local / "log.txt").write_text("not sent yet")
    (changed.local / "model").write_bytes(bytes(91))
    (deleted.home / "model").delete()
    prune_copies(keep=tmp_path)
    assert left(added, changed, deleted, sent) == ["added", "changed", "deleted"]


def test_a_storage_that_cannot_be_reached_keeps_its_copies(make: Make, tmp_path: Path) -> None:
    copies = make("one"), make("two")
    for copy in copies:
        nobody = StorageOptions("http://127.0.0.1:9")
        text = copy.record_path.read_text().replace(str(copy.home.options.endpoint_url), str(nobody.endpoint_url))
        copy.record_path.write_text(text)
        set_age(copy, 24)
    prune_copies(keep=tmp_path)
    assert left(*copies) == ["one", "two"]


def test_a_process_that_opens_a_copy_waits_for_its_removal(make: Make, tmp_path: Path) -> None:
    """Otherwise it would find the copy locked, or use a folder that is being removed."""
    copies = make("one"), make("two")
    found = list[bool]()

    def lock() -> None:
        with try_lock(copies[0].local) as has_lock:
            found.append(has_lock)

    thread = threading.Thread(target=lock)
    with file_lock(tmp_path / "cache" / ".copies.lock"), file_lock(copies[0].local / ".lock"):
        prune_copies(keep=tmp_path)
        assert left(*copies) == ["one", "two"], "only one process removes copies at a time"
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not found
    thread.join(60)
    assert found == [True]
