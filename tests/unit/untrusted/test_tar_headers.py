"""Hostile tar archives are refused in one sentence and in bounded memory."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.formats import webdataset
from raycap.pipeline.data.formats.webdataset import TarMember, tar_members
from raycap.pipeline.data.images import read_image_file
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from tests.support.forms import add_file

BLOCK = tarfile.BLOCKSIZE


def members(data: bytes) -> list[TarMember]:
    return list(tar_members(io.BytesIO(data), "a.tar"))


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A header with a right checksum and any size."""
    block = bytearray(name.ljust(100, b"\0") + b"0000644\0" * 3 + size.ljust(12, b"\0") + b"0" * 11 + b"\0" + b" " * 8)
    block = (block + kind).ljust(BLOCK, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def packed(*files: tuple[str, bytes], format_: int = tarfile.PAX_FORMAT, **pax: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_, pax_headers=pax) as archive:
        for name, content in files:
            add_file(archive, name, content)
    return buffer.getvalue()


def extended(**values: str) -> bytes:
    """A file after an extended header with these values."""
    member = tarfile.TarInfo("a.jpg")
    member.pax_headers = {key.replace("__", "."): value for key, value in values.items()}
    return member.tobuf(tarfile.PAX_FORMAT) + bytes(10 * BLOCK)


BIG = 2**62


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"a.jpg", b"77777777777"), "ends within 'a.jpg'"),
        (header(b"a.jpg", b"\x80" + BIG.to_bytes(11, "big")), "ends within 'a.jpg'"),
        (header(b"x", b"77777777777", b"x"), "headers of more than 65536 bytes"),
        (extended(a="1" * 60_000), "a number of more than 255 digits"),
        (70 * extended(a="x")[: -10 * BLOCK - BLOCK] + header(b"a.jpg", b"0"), "headers of more than 65536 bytes"),
        (header(b"0.jpg", b"0") + header(b"a", b"\xff" * 10 + b"\xfe\x00", b"Z"), "a negative size"),
        (header(b"a.jpg", b"10", b"S" + bytes(325) + b"\1"), "not a whole tar archive"),  # more of its map follows
        (header(b"a.jpg", b"10", b"S"), "sparse file 'a.jpg'"),
        (extended(size="9" * 18), "ends within 'a.jpg'"),
        (packed(("a.jpg", b"1"), ("a.jpg", b"2")), "has the file 'a.jpg' a second time"),
        (header(b"\xff.jpg", b"0"), "not a whole tar archive"),
        (b"\x1f\x8b" + bytes(1000), "unpack it to a plain tar"),
        (b"x" * 600, "not a whole tar archive"),
        (packed(("a.jpg", b"1"))[:700] + b"y" * 1000, "damaged at byte"),
    ],
)
def test_hostile_archives_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^a.tar .*{message}"):
        members(data)


def test_members_of_every_kind_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "MAX_MEMBERS", 3)
    folders = header(b"a", b"0", b"5") * 3
    assert members(folders) == []
    with pytest.raises(UserError, match="^a.tar has more than 3 members"):
        members(folders + header(b"a", b"0", b"5"))


def test_headers_in_a_sparse_terabyte_are_read_without_the_contents(tmp_path: Path) -> None:
    """The file has no blocks on the disk where the contents are."""
    path, size = tmp_path / "a.tar", 2**38
    with path.open("wb") as file:
        for number in range(4):
            file.seek(number * (size + BLOCK))
            file.write(header(b"%d.jpg" % number, b"\x80" + size.to_bytes(11, "big")))
        file.truncate(4 * (size + BLOCK))
    tracemalloc.start()
    with path.open("rb") as file:
        found = list(tar_members(file, "a.tar"))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert [member.length for member in found] == [size] * 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("0.jpg", b""), ("0.png", b"")], "has two images of one sample"),
        ([("0.jpg", b""), ("0.txt", bytes(2**20 + 1))], r"has 1048577 bytes of captions in '0.txt'"),
        ([("0.jpg", b""), ("0.json", b"[1]")], "must hold a mapping"),
        ([("0.jpg", b""), ("0.json", b'{"split": [1]}')], r"split \[1\] is not text"),
        ([("0.txt", b"a cat")], "contains no image"),
    ],
)
def test_hostile_samples_are_named(tmp_path: Path, files: list[tuple[str, bytes]], message: str) -> None:
    (tmp_path / "a.tar").write_bytes(packed(*files))
    with pytest.raises(UserError, match=message):
        read_annotations(DataSection(root=str(tmp_path), annotations="a.tar"), tmp_path)


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    """A member is a range of its archive; its name is never opened."""
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    names = ("../../secret.jpg", "/etc/passwd.jpg", "a\x1b[2J.jpg", "s3://bucket/x.jpg", "tar:1+1+1:x.jpg")
    files = [(name, b"mine") for name in names]
    (tmp_path / "data" / "a.tar").write_bytes(packed(*files, *((f"{name[:-4]}.txt", b"a cat") for name in names)))
    dataset = read_annotations(DataSection(root=str(tmp_path), annotations="data/a.tar"), tmp_path).dataset
    assert len(dataset) == 5
    assert {read_image_file(StoragePath(uri)) for uri in dataset.column("uri")} == {b"mine"}
