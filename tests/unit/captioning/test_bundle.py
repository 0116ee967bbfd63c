"""Model bundles: a round trip, failed saves, digests, what is copied from S3, and how workers get a bundle."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycap.models.base import Features
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import (
    StoredBundle,
    bundle_digests,
    bundle_source,
    fetched,
    load_bundle,
    require_intact,
    save_bundle,
    seal,
)
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.bundles import make_bundle, without_digests
from tests.support.models import (
    small_captioner,
)


@torch.no_grad()
@pytest.mark.parametrize("backbone", [True, False])
def test_a_bundle_gives_back_the_captioner(tmp_path: Path, backbone: bool) -> None:
    ours, vocabulary = small_captioner(backbone)
    folder = tmp_path / "models" / "small"
    inputs = Features(torch.randn(2, 3, 32, 32) if backbone else torch.randn(2, 4, 6))
    tokens = torch.randint(0, len(vocabulary), (4, 5))
    first = ours(inputs, tokens)
    save_bundle(folder, ours, vocabulary, name="small", info={"CIDEr": 1.5, "stages": ("a", "b")})
    for parameter in ours.parameters():
        parameter += 0.1
    assert not torch.equal(ours(inputs, tokens), first)
    bundle = load_bundle(folder)
    assert torch.equal(bundle.captioner(inputs, tokens), first)
    assert bundle.vocabulary.words == vocabulary.words and (bundle.transform is not None) == backbone
    assert bundle.config["info"] == {"CIDEr": 1.5, "stages": ["a", "b"]}
    save_bundle(folder, ours, vocabulary, name="small", info={})
    assert not torch.equal(load_bundle(folder).captioner(inputs, tokens), first)
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    if not backbone:
        with pytest.raises(ValueError, match="has no backbone"):
            bundle.captioner.features(Features(torch.zeros(1, 3, 32, 32)))


def test_a_failed_save_leaves_the_old_bundle(tmp_path: Path) -> None:
    ours, vocabulary = small_captioner(False)
    folder = tmp_path / "bundle"
    save_bundle(folder, ours, vocabulary, name="small", info={})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_bundle(folder, ours, vocabulary, name="small", info={"bad": object()})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_bundles_that_are_none_are_refused(tmp_path: Path) -> None:
    ours, vocabulary = small_captioner(False)
    folder = tmp_path / "bundle"
    with pytest.raises(ValueError, match=r"lacks config.yaml, model.safetensors, vocabulary.json"):
        load_bundle(folder)
    save_bundle(folder, ours, vocabulary, name="small", info={})
    text = (without_digests(folder) / "config.yaml").read_text()
    for change, words in (
        (("format: 2", "format: 3"), "format 3; this version of raycap reads format 2 only"),
        (("d_model: 8", "d_modle: 8"), "config.yaml: unknown key model.d_modle: did you mean d_model"),
        (("d_model: 8", "d_model: 16"), "this configuration needs"),
        (("vocabulary_size: 7", "vocabulary_size: 8"), "has 7 words, config.yaml says 8"),
    ):
        assert change[0] in text
        (folder / "config.yaml").write_text(text.replace(*change))
        with pytest.raises(ValueError, match=words):
            load_bundle(folder)


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


def test_a_bundle_in_a_local_storage_is_read_where_it_is(tmp_path: Path) -> None:
    bundle = storage_path(tmp_path / "bundle")
    assert bundle_source(bundle, parse_config(small_config(tmp_path))) == StoredBundle(bundle)


def test_the_drivers_copy_of_a_bundle_is_named_by_its_place_on_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path))
    config = parse_config(small_config({"uri": "s3://data/runs", "endpoint_url": "http://nowhere"}))
    copy = make_bundle(config.working_path / "models/demo/RUN", backbone=False)
    monkeypatch.setattr("raycap.pipeline.evaluation.captioning.bundle.fetched", lambda bundle: copy)
    place = StoragePath("s3://data/runs/models/demo/RUN", StorageOptions("http://nowhere"))
    expected = StoredBundle(place, bundle_digests(copy))
    assert bundle_source(storage_path(copy), config) == expected
    assert bundle_source(place, config) == expected, "another bundle in its place is refused by the workers"
