"""Copies of folders on S3 in which others may write: no object leads out of a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import Entry, StoragePath
from raycap.pipeline.storage.s3 import StorageError, StorageOptions


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
    """Its writer removes the marker first. The other files are fetched once."""
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
