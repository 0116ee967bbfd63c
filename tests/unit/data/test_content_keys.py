"""Snapshots of many images against a plain loop."""

from __future__ import annotations

import hashlib
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycap.pipeline.data.content_keys import MANIFEST, HashedFiles, hash_files, take_snapshot
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.images import ImageLocation, read_image_file
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import Entry
from raycap.pipeline.storage.tables import read_cache
from tests.support.buckets import Bucket
from tests.support.damage import cut
from tests.support.plain_data import Stored, plain_snapshot


def images(uris: list[str]) -> Dataset:
    """A data set of these images, in several chunks."""
    columns = [range(len(uris)), ["train"] * len(uris), uris, [["a"]] * len(uris), pa.nulls(len(uris), pa.string())]
    table = pa.table(columns, schema=SCHEMA)
    return Dataset(pa.concat_tables([table.slice(0, len(uris) // 3), table.slice(len(uris) // 3)]))


def stored_rows(path: Path) -> Stored:
    """All rows of a manifest."""
    rows = read_cache(storage_path(path), MANIFEST).to_pylist()
    found = {row["uri"]: (row["size"], row["tag"], row["key"]) for row in rows}
    assert len(found) == len(rows), "no URI is stored twice"
    return found


def key_of(uri: str) -> str:
    return hashlib.sha256(read_image_file(StoragePath(uri))).hexdigest()


class Noted:
    """`hash_files`, which records the files that it reads."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, uris: pa.Array, *others: Any) -> Iterator[HashedFiles]:
        self.read = uris.to_pylist()
        return hash_files(uris, *others)


def change(root: Path, rng: np.random.Generator) -> None:
    """Writes, replaces and removes files. Some are too large, and some are folders."""
    for number in range(60):
        path = root / f"{number % 3}" / f"{number}.png"
        if rng.random() < 0.2:
            path.parent.mkdir(exist_ok=True)
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            match int(rng.integers(0, 8)):
                case 0:
                    path.mkdir()
                case 1:
                    pass
                case size:
                    path.write_bytes(rng.bytes(2 + 5 * (size == 2)))
    for name in ("a", "b"):
        if rng.random() < 0.3:
            with tarfile.open(root / f"{name}.tar", "w") as archive:
                for number in range(10):
                    archive.add(__file__, f"{number}.png")


def any_uris(root: Path, rng: np.random.Generator) -> list[str]:
    """Images in files and in archives, some of which are missing, and some of which occur twice."""
    uris = [str(root / f"{number % 3}" / f"{number}.png") for number in range(60)]
    for name in ("a", "b", "c"):
        file = storage_path(root / f"{name}.tar")
        uris += [ImageLocation(file, (512 * number, 3), f"{number}.png").uri for number in range(12)]
    uris.append(ImageLocation(file, (10**9, 3), "behind the end.png").uri)
    return [str(uri) for uri in rng.choice(uris, int(rng.integers(1, 150)))]


def test_snapshots_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files change between the snapshots, and so do the images."""
    monkeypatch.setattr("raycap.pipeline.data.images.MAX_BYTES", 4)
    monkeypatch.setattr("raycap.pipeline.data.content_keys._FILES_PER_TASK", 8)
    rng, stored, path = np.random.default_rng(0), Stored(), tmp_path / "manifest.parquet"
    root = tmp_path / "images"
    root.mkdir()
    for _ in range(30):
        if rng.random() < 0.7:
            change(root, rng)
        uris, noted = any_uris(root, rng), Noted()
        expected = plain_snapshot(uris, stored, key_of)
        found, unreadable = take_snapshot(images(uris), path, hash_new=noted)
        found.table.validate(full=True)
        assert found.column("key") == expected.keys and found.column("uri") == uris
        assert unreadable == expected.unreadable
        assert noted.read == expected.read
        if expected.read:
            stored = expected.stored
        assert stored_rows(path) == stored


def test_snapshots_of_a_bucket_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some folders have so many other objects that their listings end early."""
    monkeypatch.setattr("raycap.pipeline.data.content_keys._LISTED_OBJECTS", 20)
    rng, stored, asked = np.random.default_rng(0), Stored(), 0
    names = [f"{folder}/{number}.png" for folder in ("a", "a/b", "c", "d") for number in range(40)] + ["a/x.tar"]
    bucket = Bucket([*[f"c/other/{number}" for number in range(2000)], *names])
    bucket.install(monkeypatch)

    def hash_names(uris: pa.Array, *_: Any) -> Iterator[HashedFiles]:
        yield [hashlib.sha256(f"{uri} {bucket.objects}".encode()).hexdigest() for uri in uris.to_pylist()], {}

    for _ in range(12):
        uris = [f"s3://bucket/{name}" for name in rng.choice(names, int(rng.integers(1, 60)))]
        archive = StoragePath(str(rng.choice(["s3://bucket/a/x.tar", "s3://bucket/c/y.tar"])))
        uris += [ImageLocation(archive, (number, 3), "").uri for number in range(3)] + ["s3://bucket/c/none.png"]
        for name in rng.choice(names, 5):
            bucket.objects[f"s3://bucket/{name}"] = Entry(1, str(rng.integers(100)))
        bucket.objects.pop(f"s3://bucket/{rng.choice(names)}", None)
        texts = f"{bucket.objects}"
        expected = plain_snapshot(uris, stored, lambda uri: hashlib.sha256(f"{uri} {texts}".encode()).hexdigest())  # noqa: B023
        bucket.asked.clear()
        found, unreadable = take_snapshot(images(uris), tmp_path / "manifest.parquet", hash_new=hash_names)
        asked += len(bucket.asked)
        assert found.column("key") == expected.keys
        assert unreadable == expected.unreadable
        stored = expected.stored if expected.read else stored
        assert stored_rows(tmp_path / "manifest.parquet") == stored
    assert asked, "the listing of c/ ended early"


def test_a_kill_keeps_what_was_written_and_a_damaged_manifest_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(b"%d" % number)
    uris, path = [str(tmp_path / f"{number}.png") for number in range(60)], tmp_path / "manifest.parquet"
    for name, value in (("_URIS_PER_SLICE", 10), ("_WRITE_EVERY_S", 0), ("_WRITE_SHARE", 1e9)):
        monkeypatch.setattr(f"raycap.pipeline.data.content_keys.{name}", value)

    def hash_some(uris: pa.Array, *others: Any) -> Iterator[HashedFiles]:
        yield from itertools.islice(hash_files(uris, *others), 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_snapshot(images(uris), path, hash_new=hash_some)
    noted = Noted()
    whole = take_snapshot(images(uris), path, hash_new=noted)[0]
    assert noted.read == uris[30:]
    cut(path)
    assert take_snapshot(images(uris), path, hash_new=noted)[0].table.equals(whole.table)
    assert noted.read == uris and any(str(path) in line for line in log_lines)
