"""Copies of folders on S3 that nobody uses are removed, and can be downloaded again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.mirror import UNUSED_FOR_S, Mirror, prune_copies
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.runs import empty_run

Make = Callable[..., Mirror]


@pytest.fixture
def make(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    """Makes a copy that was pushed some time ago, by default long enough to be removed."""
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))

    def copy(name: str, age_s: float = UNUSED_FOR_S + 60, place: str = "storage/abc/runs") -> Mirror:
        home = StoragePath(f"s3://data/{request.node.name}/{name}", StorageOptions(s3))
        made = Mirror(home, tmp_path / "cache" / place / name)
        made.local.mkdir(parents=True)
        (made.local / "model").write_bytes(bytes(90))
        made.push()
        os.utime(made.record_path, (time.time() - age_s,) * 2)
        return made

    return copy


def test_copies_that_nobody_has_used_for_a_week_are_removed(make: Make, tmp_path: Path) -> None:
    old, bundle, recent, needed = make("old"), make("b", place="bundles"), make("recent", 3600), make("needed")
    locked, training = make("locked"), make("training", place="workers/abc/RUN/token")
    elsewhere = tmp_path / "cache" / "shards" / "x.npy"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(bytes(1000))
    with try_lock(locked.local) as has_lock, empty_run(training.local, training.home).in_use():
        assert has_lock
        prune_copies(keep=needed.local)
    copies = (old, bundle, recent, needed, locked, training)
    assert [copy.local.name for copy in copies if copy.local.is_dir()] == ["recent", "needed", "locked", "training"]
    assert elsewhere.exists()
    old.pull()
    assert (old.local / "model").read_bytes() == bytes(90), "a removed copy is downloaded again"
