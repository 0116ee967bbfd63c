"""Changes below the data root, detected by names, sizes and tags alone."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.retrain.champion import LISTING, Change, compare, list_data, new_keys, with_keys
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.tables import from_bytes, to_bytes
from tests.conftest import small_config


def listed(root: Path, storage: Path) -> pa.Table:
    config = parse_config(small_config(storage, data={"root": str(root), "train_splits": ["train"]}))
    return list_data(config, str(root))


def write(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_changes_are_counted_without_reading_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "set"
    write(root, ["dataset.json", *(f"images/{number}.png" for number in range(90))])
    monkeypatch.setattr(StoragePath, "read_bytes", lambda self, *limit: pytest.fail(f"{self} was read"))
    before = listed(root, tmp_path / "results")
    assert before.num_rows == 91 and before.schema == LISTING
    assert compare(before, None) == Change(added=91, changed=0, gone=0)
    assert compare(before, before) == Change(added=0, changed=0, gone=0)
    (root / "images/7.png").write_text("longer than it was")
    os.utime(root / "images/8.png", ns=(1, 1))
    (root / "images/9.png").unlink()
    write(root, ["images/new.png", "images/.new.png.tmp", ".cache/x"])
    now = listed(root, tmp_path / "results")
    assert compare(now, from_bytes(to_bytes(before), LISTING)) == Change(added=1, changed=2, gone=1)
    assert str(compare(now, before)) == "1 new, 2 changed, 1 gone"


def test_results_below_the_data_root_are_not_listed(tmp_path: Path) -> None:
    write(tmp_path, ["a.png", "results/runs/b.png", "results-of-others/c.png"])
    uris = listed(tmp_path, tmp_path / "results")["uri"].to_pylist()
    assert sorted(uris) == [f"{tmp_path}/a.png", f"{tmp_path}/results-of-others/c.png"]


def test_new_images_are_new_content_not_new_names(tmp_path: Path) -> None:
    """This includes images in an archive, although a listing shows only the archive."""
    root = tmp_path / "set"
    write(root, ["a.tar", "b.png"])
    uris = [f"tar:{512 * n}+9+{len(str(root)) + 6}:{root}/a.tar/{n}.jpg" for n in range(3)] + [f"{root}/b.png"]
    rows = [range(4), ["train"] * 4, uris, [["A."]] * 4, ["k0", "k1", "k2", "k3"]]
    dataset = Dataset(pa.table([pa.array(row, field.type) for row, field in zip(rows, SCHEMA, strict=True)], SCHEMA))
    listing = listed(root, tmp_path / "results")
    snapshot = from_bytes(to_bytes(with_keys(listing, dataset)), LISTING)
    assert compare(listing, snapshot) == Change(added=0, changed=0, gone=0)
    assert new_keys(dataset, None) == 4 and new_keys(dataset, snapshot) == 0
    (root / "a.tar").write_text("replaced")
    assert compare(listed(root, tmp_path / "results"), snapshot) == Change(added=0, changed=1, gone=0)
    assert new_keys(dataset.with_column("key", pa.array(["k0", "k1", "new", "k3"])), snapshot) == 1
