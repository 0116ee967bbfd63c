"""Atomic writes: the old content or the new, never a part, and nothing left behind after an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycap.pipeline.errors import DamagedError
from raycap.pipeline.storage.atomic import atomic_folder, atomic_path, read_json, write_text


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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "DONE.json").write_bytes(content)
    with pytest.raises(DamagedError, match=f"{tmp_path}/DONE.json is damaged: ."):
        read_json(tmp_path / "DONE.json")


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
    with pytest.raises(OSError), atomic_folder(folder, replace=False) as temporary:
        (temporary / "third").write_text("x")
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        raise RuntimeError
    assert names(tmp_path) == ["above", "above/folder", "above/folder/second"]
