"""Names from elsewhere stay in their folder, and files of other kinds are not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raycap.jobs.submit import check_paths
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path, printable, relative_name
from raycap.pipeline.storage.path import cache_folder, storage_path
from raycap.pipeline.storage.untrusted.documents import read_regular_file

BAD_NAMES = [
    "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "", ".", "..", "a/", "a\\b", "a\0b", "a\nb",
    "\udc80", "/", "//x",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^s3://b/p: the name .* is not a plain relative path"):
        relative_name(name, "s3://b/p")


@pytest.mark.parametrize("name", ["model.safetensors", "log/journal/00001.jsonl", "..a/b..", "häuser/图.png", "a b"])
def test_plain_names_are_kept(name: str) -> None:
    assert relative_name(name, "s3://b/p") == name


def test_what_is_printed_has_no_control_characters() -> None:
    text = "a\x1b[2J\x07\n\r\t\x85\u202e\udc80 ä 图"
    assert printable(text).isprintable() and printable("ä 图 -") == "ä 图 -"
    assert printable(text) == r"a\x1b[2J\x07\n\r\t\x85\u202e\udc80 ä 图"


def test_a_home_folder_of_no_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "~nosuchuser/x"
    monkeypatch.setenv("RAYCAP_CACHE", path)
    calls: list[Callable[[], object]] = [
        lambda: storage_path(path), lambda: check_paths([("--out", path)], ()), cache_folder,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UserError, match="^~nosuchuser/x begins with ~ and names no user's home folder; give anoth"):
            call()
    monkeypatch.setenv("HOME", "/home/of/user")
    assert expanded_path("~/x") == Path("/home/of/user/x") and storage_path("~/x").uri == "/home/of/user/x"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular_file(tmp_path / "link", 5) == b"12345"
    for path, reason in (
        (tmp_path / "pipe", "not a regular"),
        (Path("/dev/zero"), "not a regular"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(OSError, match=reason):
            read_regular_file(path)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular_file(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "missing")
