"""Digests: each file is read once per machine, and any change of it is found."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NoReturn

import pytest

from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.storage import digests
from raycap.pipeline.storage.atomic import read_json
from raycap.pipeline.storage.digests import DIGESTS, require_whole, write_digests
from tests.support.damage import flip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    (tmp_path / ".hidden").write_text("")
    write_digests(tmp_path)
    return tmp_path


def test_a_flipped_bit_is_found_and_named(folder: Path) -> None:
    assert set(read_json(folder / DIGESTS)["files"]) == {"a.bin", "b.bin"}
    require_whole(folder / "a.bin")
    flip(folder / "a.bin", random.Random(0))
    with pytest.raises(DamagedError, match=f"{folder}/a.bin is damaged"):
        require_whole(folder / "a.bin")
    require_whole(folder / "b.bin")
    (folder / "b.bin").unlink()
    with pytest.raises(DamagedError, match="b.bin is missing"):
        require_whole(folder / "b.bin")


def test_a_file_is_read_once_per_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> NoReturn:
        raise AssertionError("it is read")

    require_whole(folder / "a.bin")
    monkeypatch.setattr(digests, "file_digest", refuse)
    require_whole(folder / "a.bin")
    for name in ("a.bin", "b.bin"):  # changed since, and not read before
        (folder / name).write_bytes((folder / name).read_bytes())
        with pytest.raises(AssertionError, match="it is read"):
            require_whole(folder / name)


def test_a_sparse_file_is_damaged_and_not_read(folder: Path) -> None:
    os.truncate(folder / "a.bin", 2**40)
    with pytest.raises(DamagedError, match="a.bin is damaged"):
        require_whole(folder / "a.bin")
    with pytest.raises(UserError, match="a.bin is damaged: it has 1099511627776 bytes, of which"):
        write_digests(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1, "files": {"a.bin": 1}}'])
def test_damaged_digests_are_damage(folder: Path, content: bytes) -> None:
    (folder / DIGESTS).write_bytes(content)
    with pytest.raises(DamagedError, match=str(folder)):
        require_whole(folder / "a.bin")
