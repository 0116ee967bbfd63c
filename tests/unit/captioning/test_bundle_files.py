"""Digests of bundles, and what is copied of a bundle on S3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    bundle_digests,
    fetched,
    load_bundle,
    require_intact,
    seal,
)
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.bundles import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small", backbone=False)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_file_that_is_missing_or_unknown_to_the_digests_is_named(copy: Path) -> None:
    (copy / "notes.txt").write_text("a file of the user's")
    require_intact(copy)
    content = (copy / "preprocessing.json").read_bytes()
    (copy / "preprocessing.json").unlink()
    with pytest.raises(UserError, match=r"lacks preprocessing.json, which is in its digests.json"):
        require_intact(copy)
    seal(copy)
    (copy / "preprocessing.json").write_bytes(content)
    with pytest.raises(UserError, match=r"preprocessing.json does not have the digest in digests.json"):
        require_intact(copy)
    (copy / "preprocessing.json").unlink()
    os.mkfifo(copy / "preprocessing.json")
    require_intact(copy)  # nobody reads it
    assert "preprocessing.json" not in bundle_digests(copy)
    with pytest.raises(UserError, match="lacks preprocessing.json"):
        bundle_digests(copy, ["preprocessing.json"])


def test_only_the_files_of_a_bundle_are_copied_from_s3(s3: str, bundle: Path, tmp_path: Path) -> None:
    """An object's name cannot choose another place, and a bundle can be loaded in spite of such objects."""
    home = StoragePath("s3://data/offered/model", StorageOptions(s3))
    for path in bundle.iterdir():
        (home / path.name).write_bytes(path.read_bytes())
    victim = tmp_path / "victim"
    for name in (f"/{victim}", "../victim", "a/../../victim", "deep/config.yaml", "extra.py", ".hidden", "", "folder/"):
        StoragePath(f"{home.uri}/{name}", home.options).write_bytes(b"planted")
    folder = fetched(home)
    assert {path.name for path in folder.iterdir()} == {path.name for path in bundle.iterdir()}
    assert load_bundle(folder).config["name"] == "small" and not victim.exists()


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("config.yaml", "bundle.FILE_LIMITS", "more than the 9999 that such a file may have; give another"),
        ("model.safetensors", "bundle.memory_bytes", "more than the 9999 that this machine has as memory; give"),
    ],
)
def test_a_bundle_on_s3_with_a_file_that_is_too_large_is_not_fetched(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: str, words: str
) -> None:
    home = StoragePath(f"s3://data/{tmp_path.name}", StorageOptions(s3))
    (home / "vocabulary.json").write_bytes(b"[]")
    (home / name).write_bytes(bytes(10_000))
    values: dict[str, Any] = {"FILE_LIMITS": {name: 9999}, "memory_bytes": lambda: 9999}
    value = values.get(limit.split(".")[-1], lambda _: SimpleNamespace(free=9999))
    with monkeypatch.context() as limited:
        limited.setattr(f"raycap.pipeline.evaluation.captioning.{limit}", value)
        limited.setattr(StoragePath, "download", lambda *_: pytest.fail("a file was fetched"))
        with pytest.raises(UserError, match=words) as raised:
            fetched(home)
    assert str(raised.value).startswith(home.uri) and "1000" in str(raised.value)
    assert sorted(path.name for path in fetched(home).iterdir()) == sorted([name, "vocabulary.json"])
