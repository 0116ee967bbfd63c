"""Atomic writes: the old content or the new, never a part, and nothing left behind after an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.runs.folder import stored_config
from raycap.pipeline.runs.journal import Follower
from raycap.pipeline.storage.atomic import (
    atomic_folder,
    atomic_path,
    file_lock,
    read_json,
    try_file_lock,
    write_text,
)
from raycap.pipeline.storage.digests import file_digest


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.bin"
    for content in (b"first", b"second"):
        before = path.read_bytes() if path.exists() else None
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
            assert (path.read_bytes() if path.exists() else None) == before
            assert temporary.parent == path.parent and temporary.name.startswith(".") and temporary.suffix == ".tmp"
        assert path.read_bytes() == content and names(tmp_path) == ["folder", "folder/file.bin"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(FileNotFoundError), atomic_path(path):
        pass  # nothing was written
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_flushed_before_the_rename_and_its_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    flushed: list[Path] = []

    def flush(number: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{number}").readlink())
        if flushed[-1] == tmp_path:
            assert any(path.name in ("file", "folder") for path in tmp_path.iterdir()), "it was renamed"

    monkeypatch.setattr(os, "fsync", flush)
    with atomic_path(tmp_path / "file", durable=durable) as temporary:
        temporary.write_text("x")
    assert flushed == ([temporary, tmp_path] if durable else [])
    (tmp_path / "file").unlink()
    flushed.clear()
    with atomic_folder(tmp_path / "folder", durable=durable) as temporary:
        (temporary / "a").write_text("x")
        (temporary / "b").mkdir()
        (temporary / "b" / "c").write_text("x")
    expected = {temporary, temporary / "a", temporary / "b", temporary / "b" / "c"} if durable else set()
    assert set(flushed[:-1]) == expected and flushed[-1:] == ([tmp_path] if durable else [])


def test_a_folder_that_cannot_be_moved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename, errors = tmp_path / "folder", Path.rename, [OSError("no space")]
    with atomic_folder(folder) as temporary:
        (temporary / "first").write_text("x")

    def fail_once(path: Path, target: Path) -> Path:
        if target == folder and errors:
            raise errors.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="no space"), atomic_folder(folder) as temporary:
        (temporary / "second").write_text("x")
    assert names(tmp_path) == ["folder", "folder/first"]


def test_a_folder_replaces_an_older_one_or_refuses_to(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    for name in ("first", "second"):
        with atomic_folder(folder) as temporary:
            (temporary / name).write_text("x")
        assert names(tmp_path) == ["above", "above/folder", f"above/folder/{name}"]
    (tmp_path / "link").symlink_to(folder)
    with atomic_folder(tmp_path / "link") as temporary:
        (temporary / "third").write_text("x")
    expected = ["above", "above/folder", "above/folder/second", "link", "link/third"]
    assert names(tmp_path) == expected and not (tmp_path / "link").is_symlink()
    shutil.rmtree(tmp_path / "link")
    with pytest.raises(OSError), atomic_folder(folder, replace=False) as temporary:
        (temporary / "third").write_text("x")
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        raise RuntimeError
    assert names(tmp_path) == ["above", "above/folder", "above/folder/second"]


@pytest.mark.parametrize("lock", [file_lock, try_file_lock])
def test_a_lock_empties_no_file_and_waits_for_no_pipe(tmp_path: Path, lock: Callable[..., Any]) -> None:
    """Who writes to a storage can put a link or a pipe in the place of a run's lock."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "absent").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "absent", "pipe"):
        with pytest.raises(OSError), lock(tmp_path / name):
            pass
    with lock(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").read_text() == "precious" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "read", [read_json, file_digest, Dataset.load, stored_config, lambda path: Follower(path.parent)]
)
def test_a_pipe_in_a_storage_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    for name in ("1.jsonl", "config.yaml"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path if read is stored_config else tmp_path / "1.jsonl")
