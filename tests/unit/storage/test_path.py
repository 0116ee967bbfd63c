"""Local paths and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.storage.path import StoragePath, storage_path


def test_paths_are_absolute_and_without_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for name in ("../b", "../b/", "./../a/../b", f"{tmp_path}/a/../b", Path("../b")):
        assert storage_path(name).uri == f"{tmp_path}/b"
    assert storage_path("s3://bucket/a/").uri == "s3://bucket/a"


def test_a_link_to_itself_is_not_listed(tmp_path: Path) -> None:
    for name in ("loop", "broken"):
        (tmp_path / name).symlink_to("missing" if name == "broken" else name)
    (tmp_path / "a.jpg").write_bytes(b"abc")
    assert {name: entry.size for name, entry in StoragePath(str(tmp_path)).walk()} == {"a.jpg": 3}
    assert StoragePath(f"{tmp_path}/missing").list() == {} == StoragePath(f"{tmp_path}/a.jpg").list()
    with pytest.raises(OSError, match="symbolic links"):
        StoragePath(f"{tmp_path}/loop").list()
