"""How workers get a model: by its place in the storage, never by a path on the driver's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle, bundle_digests, bundle_source
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.bundles import make_bundle


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


def test_a_bundle_with_other_files_than_recorded_is_refused(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", backbone=False)
    digests = bundle_digests(folder)
    assert StoredBundle(storage_path(folder), digests).load().config["name"] == "small"
    with pytest.raises(OSError, match="preprocessing.json is missing or has changed"):
        StoredBundle(storage_path(folder), digests | {"preprocessing.json": "0" * 64}).load()
