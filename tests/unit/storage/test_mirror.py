"""Copies of folders on S3: no object leads out of a copy, and copies that nobody uses are removed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.runs.folder import try_lock
from raycap.pipeline.storage.mirror import UNUSED_FOR_S, Mirror, prune_copies
from raycap.pipeline.storage.path import Entry, StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions
from tests.support.runs import empty_run


@pytest.fixture
def copy(s3: str, tmp_path: Path) -> Mirror:
    home = StoragePath(f"s3://data/mirror/{tmp_path.name}", StorageOptions(s3))
    (home / "a/b.txt").write_bytes(b"good")
    return Mirror(home, tmp_path / "deep" / "copy")


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file())


@pytest.mark.parametrize("name", ["{tmp}/victim", "../../victim", "a/../../../victim", "a\\b", "a\x07b", "a//b", "./x"])
def test_an_object_with_another_place_in_its_name_is_refused(copy: Mirror, tmp_path: Path, name: str) -> None:
    StoragePath(f"{copy.home.uri}/{name.format(tmp=tmp_path)}", copy.home.options).write_bytes(b"planted")
    with pytest.raises(UserError, match="is not a plain relative path"):
        copy.pull()
    assert files(tmp_path) == [], "not even the good file was written"


def test_hidden_objects_and_marks_of_folders_are_left_out(copy: Mirror) -> None:
    for name in (".lock", "a/.b.txt.tmp", ".c/d", "", "a/", "empty/"):
        StoragePath(f"{copy.home.uri}/{name}", copy.home.options).write_bytes(b"other")
    for _ in range(2):
        copy.pull()
        assert files(copy.local) == ["a/b.txt"]
        assert {path.name for path in copy.local.rglob("*")} == {"a", "b.txt"}


def test_a_checkpoint_that_is_replaced_meanwhile_gives_the_next_one(
    copy: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of a checkpoint removes its marker first. The other files are fetched once."""
    fetched, download = list[str](), StoragePath.download

    def checkpoint(number: int) -> StoragePath:
        return copy.home / f"stages/xe/step-{number}"

    def replacing(path: StoragePath, target: Path) -> Entry:
        fetched.append(path.name)
        if path.name == "state.pt" and len(fetched) < limit:
            number = int(path.uri.split("/")[-2].removeprefix("step-"))
            checkpoint(number).delete_folder()
            write(number + 1)
        return download(path, target)

    def write(number: int) -> None:
        for name in ("state.pt", "progress.json"):
            (checkpoint(number) / name).write_bytes(str(number).encode())

    write(1)
    monkeypatch.setattr(StoragePath, "download", replacing)
    limit = 4
    copy.pull()
    assert files(copy.local) == ["a/b.txt", "stages/xe/step-2/progress.json", "stages/xe/step-2/state.pt"]
    assert fetched.count("b.txt") == 1 and fetched.count("state.pt") == 2
    limit = 1000
    (checkpoint(2) / "state.pt").write_bytes(b"again")
    with pytest.raises(StorageError, match="files are removed while they are copied, because another process writes"):
        copy.pull()
    assert fetched.count("state.pt") == 2 + 3


@pytest.fixture
def make(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Mirror]:
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


def test_copies_that_nobody_has_used_for_a_week_are_removed(make: Callable[..., Mirror], tmp_path: Path) -> None:
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
