"""Digests: each file is read once per machine, and any change of it is found. Also local paths."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NoReturn

import pytest

from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.storage import digests
from raycap.pipeline.storage.digests import DIGESTS, digests_in, file_digest, has_digest, write_digests
from raycap.pipeline.storage.path import StoragePath, storage_path
from tests.support.damage import flip


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin", ".hidden"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    write_digests(tmp_path)
    recorded = digests_in((tmp_path / DIGESTS).read_bytes(), DIGESTS)
    assert recorded == {name: file_digest(tmp_path / name) for name in ("a.bin", "b.bin")}
    assert has_digest(tmp_path / "a.bin", recorded["a.bin"])
    flip(tmp_path / "a.bin", random.Random(0))
    assert not has_digest(tmp_path / "a.bin", recorded["a.bin"])


def test_a_file_is_read_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> NoReturn:
        raise AssertionError("it is read")

    path = tmp_path / "a.bin"
    path.write_bytes(b"a" * 1000)
    digest = file_digest(path)
    assert has_digest(path, digest)
    monkeypatch.setattr(digests, "file_digest", refuse)
    assert has_digest(path, digest)
    path.write_bytes(path.read_bytes())
    with pytest.raises(AssertionError, match="it is read"):
        has_digest(path, digest)


def test_a_sparse_file_is_damaged_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    os.truncate(tmp_path / "a.bin", 2**40)
    assert not has_digest(tmp_path / "a.bin", "0" * 64)
    with pytest.raises(UserError, match="a.bin is damaged: it has 1099511627776 bytes, of which"):
        write_digests(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {"a.bin": 1}}'])
def test_damaged_digests_are_damage(content: bytes) -> None:
    with pytest.raises(DamagedError, match=DIGESTS):
        digests_in(content, DIGESTS)


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


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    for name in ("set/train/a.jpg", "set/a/.b.txt", "elsewhere/c.jpg", "elsewhere/deep/d.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    links = {"set/test": "../elsewhere", "set/a/up": "../..", "set/again": "train", "elsewhere/loop": ".", "set/x": "x"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    left_out: list[tuple[str, str]] = []
    place = StoragePath(f"{tmp_path}/set")
    names = sorted(place.names(lambda *each: left_out.append(each)))
    assert names == ["a/.b.txt", "test/c.jpg", "test/deep/d.jpg", "train/a.jpg", "x"]
    kind = "links to folders that are read under another name"
    assert left_out.pop(1) == ("links to folders above them", f"{place}/a/up")
    assert left_out == [(kind, f"{place}/again"), (kind, f"{place}/test/loop")]
    assert not [*(place / "missing").names(), *(place / "train/a.jpg").names()]
