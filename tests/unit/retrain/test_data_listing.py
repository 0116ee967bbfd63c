"""Changes below the data root, detected by names, sizes and tags alone."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from raycap.pipeline.config.load import parse_config
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.reading import data_root, read_annotations
from raycap.pipeline.retrain.data_listing import LISTING, Change, compare, list_data, new_keys, with_keys
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
    write(root, ["dataset.json", *(f"images/{number}.png" for number in range(9_000))])
    monkeypatch.setattr(StoragePath, "read_bytes", lambda self, *limit: pytest.fail(f"{self} was read"))
    before = listed(root, tmp_path / "results")
    assert before.num_rows == 9_001 and before.schema == LISTING
    assert compare(before, None) == Change(added=9_001, changed=0, gone=0)
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
    names = listed(tmp_path, tmp_path / "results")["name"].to_pylist()
    assert sorted(names) == ["a.png", "results-of-others/c.png"]


def test_new_images_are_new_content_not_new_names(tmp_path: Path) -> None:
    names = [f"images/{number}.png" for number in range(3)]
    write(tmp_path, ["dataset.json", *names])
    rows = [[1, 2, 3], ["train"] * 3, [f"{tmp_path}/{name}" for name in names], [["A."]] * 3, ["k0", "k1", "k2"]]
    dataset = Dataset(pa.table([pa.array(row, field.type) for row, field in zip(rows, SCHEMA, strict=True)], SCHEMA))
    snapshot = with_keys(listed(tmp_path, tmp_path / "results"), dataset, str(tmp_path))
    keys = dict(zip(snapshot["name"].to_pylist(), snapshot["key"].to_pylist(), strict=True))
    assert keys == {"dataset.json": None, **{name: f"k{number}" for number, name in enumerate(names)}}
    assert new_keys(dataset, None) == 3 and new_keys(dataset, snapshot) == 0
    assert (
        new_keys(dataset, snapshot.filter(pa.array([name != names[1] for name in snapshot["name"].to_pylist()]))) == 1
    )


def test_images_in_an_archive_are_known_by_their_content(tmp_path: Path) -> None:
    """The listing has the archive; the keys of its images are further rows, which are no files."""
    root = tmp_path / "set"
    write(root, ["a.tar", "b.png"])
    uris = [f"tar:{512 * n}+9+{len(str(root)) + 6}:{root}/a.tar/{n}.jpg" for n in range(3)] + [f"{root}/b.png"]
    rows = [range(4), ["train"] * 4, uris, [["A."]] * 4, ["k0", "k1", "k2", "k3"]]
    dataset = Dataset(pa.table([pa.array(row, field.type) for row, field in zip(rows, SCHEMA, strict=True)], SCHEMA))
    listing = listed(root, tmp_path / "results")
    snapshot = from_bytes(to_bytes(with_keys(listing, dataset, str(root))), LISTING)
    assert listing.num_rows == 2 and snapshot.num_rows == 5
    assert new_keys(dataset, snapshot) == 0 and compare(listing, snapshot) == Change(added=0, changed=0, gone=0)
    (root / "a.tar").write_text("replaced")
    assert compare(listed(root, tmp_path / "results"), snapshot) == Change(added=0, changed=1, gone=0)
    new = dataset.with_column("key", pa.array(["k0", "k1", "new", "k3"]))
    assert new_keys(new, snapshot) == 1


def test_keys_are_found_below_a_root_with_dots(tmp_path: Path) -> None:
    write(tmp_path / "set", ["images/a.png"])
    (tmp_path / "other").mkdir()
    (tmp_path / "set/t.jsonl").write_text('{"image": "images/a.png", "text": "a cat"}\n')
    data = {"root": f"{tmp_path}/other/../set", "annotations": "t.jsonl", "train_splits": ["train"]}
    config = parse_config(small_config(tmp_path / "results", data=data))
    root = data_root(config)
    dataset = read_annotations(config.data, root)[0]
    dataset = dataset.with_column("key", pa.array(["k0"]))
    snapshot = with_keys(list_data(config, root), dataset, root)
    keys = dict(zip(snapshot["name"].to_pylist(), snapshot["key"].to_pylist(), strict=True))
    assert keys == {"t.jsonl": None, "images/a.png": "k0"}
