"""Atomic writes: the old content or the new, never a part, and nothing left behind after an error."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.storage.atomic import atomic_folder, atomic_path, read_json, write_json, write_text


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
def test_content_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(f"/proc/self/fd/{number}").readlink()))
    with atomic_path(tmp_path / "file", durable=durable) as temporary:
        temporary.write_text("x")
    assert flushed == ([temporary] if durable else [])
    flushed.clear()
    with atomic_folder(tmp_path / "folder", durable=durable) as temporary:
        (temporary / "a").write_text("x")
        (temporary / "b").mkdir()
        (temporary / "b" / "c").write_text("x")
    expected = {temporary, temporary / "a", temporary / "b", temporary / "b" / "c"} if durable else set()
    assert set(flushed) == expected


def test_threads_that_write_one_name_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_json(path, [number] * 1000), range(64)))
    assert len(set(read_json(path))) == 1 and names(tmp_path) == ["value.json"]


def test_a_folder_replaces_an_older_one_or_refuses_to(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    for name in ("first", "second"):
        with atomic_folder(folder) as temporary:
            (temporary / name).write_text("x")
        assert names(tmp_path) == ["above", "above/folder", f"above/folder/{name}"]
    with pytest.raises(OSError), atomic_folder(folder, replace=False) as temporary:
        (temporary / "third").write_text("x")
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        raise RuntimeError
    assert names(tmp_path) == ["above", "above/folder", "above/folder/second"]


def test_the_older_folder_is_put_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "folder", Path.rename
    with atomic_folder(folder) as temporary:
        (temporary / "old").write_text("x")

    def refused(path: Path, target: Path) -> Path:
        if path == temporary:
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError), atomic_folder(folder) as temporary:
        (temporary / "new").write_text("x")
    assert names(tmp_path) == ["folder", "folder/old"]
