"""Snapshots of many images, whose manifest has several parts, against a plain loop."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.data import manifests
from raycap.pipeline.data.content_keys import HashedFiles, hash_with_threads, take_snapshot
from raycap.pipeline.data.dataset import SCHEMA, Dataset
from raycap.pipeline.data.images import ImageLocation, read_image_file
from raycap.pipeline.data.manifests import Manifest
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import Entry, StorageOptions
from raycap.pipeline.storage.tables import read_cache, table_batches, write_table
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
    manifest = Manifest(storage_path(path), 0)
    rows = [row for part in range(manifest.num_parts) for row in manifest.read(part).to_pylist()]
    found = {row["uri"]: (row["size"], row["tag"], row["key"]) for row in rows}
    assert len(found) == len(rows), "no URI is stored twice"
    return found


def key_of(uri: str) -> str:
    return hashlib.sha256(read_image_file(StoragePath(uri))).hexdigest()


class Noted:
    """Hashes files with threads and notes which, in the form of `HashFiles`; each part in another order."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, uris: pa.ChunkedArray, options: StorageOptions) -> Iterator[HashedFiles]:
        self.read = uris.to_pylist()
        for part in hash_with_threads(uris, options):
            order = np.arange(len(part.numbers))[::-1]
            yield HashedFiles(part.numbers[order], part.keys.take(pa.array(order)), part.reasons)


def limit(monkeypatch: pytest.MonkeyPatch, images_per_part: int, spilled: int) -> None:
    monkeypatch.setattr(manifests, "PART_IMAGES", images_per_part)
    monkeypatch.setattr("raycap.pipeline.storage.tables.SPILL_BYTES", spilled)
    monkeypatch.setattr("raycap.pipeline.data.content_keys._ROWS_AT_A_TIME", 16)
    monkeypatch.setattr("raycap.pipeline.data.content_keys._URIS_PER_TASK", 8)


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


@pytest.mark.parametrize("spilled", [0, 2**25])
def test_snapshots_are_those_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilled: int) -> None:
    """Files change between the snapshots, and so do the images and the number of parts."""
    monkeypatch.setattr("raycap.pipeline.data.content_keys.MAX_BYTES", 4)
    rng, stored, path = np.random.default_rng(spilled), Stored(), tmp_path / "manifest.parquet"
    root = tmp_path / "images"
    root.mkdir()
    for number in range(40):
        limit(monkeypatch, [1000, 1000, 50, 20, 7, 1000][number // 7], spilled)
        if rng.random() < 0.7:
            change(root, rng)
        uris, noted = any_uris(root, rng), Noted()
        expected = plain_snapshot(uris, stored, key_of, 4)
        found, unreadable = take_snapshot(images(uris), path, hash_files=noted)
        found.table.validate(full=True)
        assert found.column("key") == expected.keys and found.column("uri") == uris
        assert list(unreadable.items()) == list(expected.unreadable.items())
        assert noted.read == expected.read
        if expected.read:
            stored = expected.stored
        assert stored_rows(path) == stored
    assert not path.exists() and len(list(Path(f"{path}.parts").iterdir())) <= 32, "only the finest parts remain"


@pytest.mark.parametrize("images_per_part", [1000, 30])
def test_snapshots_of_a_bucket_are_those_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images_per_part: int
) -> None:
    """Some folders have so many other objects that their listings end early."""
    limit(monkeypatch, images_per_part, 0)
    monkeypatch.setattr("raycap.pipeline.data.content_keys._LISTED_OBJECTS", 20)
    rng, stored, asked = np.random.default_rng(0), Stored(), 0
    names = [f"{folder}/{number}.png" for folder in ("a", "a/b", "c", "d") for number in range(40)] + ["a/x.tar"]
    bucket = Bucket([*[f"c/other/{number}" for number in range(2000)], *names])
    bucket.install(monkeypatch)

    def hash_files(uris: pa.ChunkedArray, _: StorageOptions) -> Iterator[HashedFiles]:
        texts = uris.to_pylist()
        keys = pa.array([hashlib.sha256(f"{uri} {bucket.objects}".encode()).hexdigest() for uri in texts])
        yield HashedFiles(np.arange(len(texts)), keys, {})

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
        found, unreadable = take_snapshot(images(uris), tmp_path / "manifest.parquet", hash_files=hash_files)
        asked += len(bucket.asked)
        assert found.column("key") == expected.keys
        assert list(unreadable.items()) == list(expected.unreadable.items())
        stored = expected.stored if expected.read else stored
        assert stored_rows(tmp_path / "manifest.parquet") == stored
    assert asked, "the listing of c/ ended early"


def write_images(folder: Path, count: int) -> list[str]:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.png").write_bytes(b"%d" % number)
    return [str(folder / f"{number}.png") for number in range(count)]


def test_a_kill_keeps_what_was_written_and_only_changed_parts_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uris, path = write_images(tmp_path / "images", 60), tmp_path / "manifest.parquet"
    folder = Path(f"{path}.parts")
    limit(monkeypatch, 16, 0)
    for name, value in (("_URIS_PER_SLICE", 10), ("_WRITE_EVERY_S", 0), ("_WRITE_SHARE", 1e9)):
        monkeypatch.setattr(f"raycap.pipeline.data.content_keys.{name}", value)

    def hash_some(uris: pa.ChunkedArray, options: StorageOptions) -> Iterator[HashedFiles]:
        for number, part in enumerate(hash_with_threads(uris, options)):
            if number == 3:
                raise KeyboardInterrupt
            yield part

    with pytest.raises(KeyboardInterrupt):
        take_snapshot(images(uris), path, hash_files=hash_some)
    assert [name.name[:4] for name in folder.iterdir()] == ["new-"] * 3
    noted = Noted()
    take_snapshot(images(uris), path, hash_files=noted)
    assert noted.read == uris[30:]
    assert sorted(name.name for name in folder.iterdir()) == [f"02-{part:05}.parquet" for part in range(4)]

    before = {name: name.stat().st_mtime_ns for name in folder.iterdir()}
    take_snapshot(images(uris), path)
    assert {name: name.stat().st_mtime_ns for name in folder.iterdir()} == before, "nothing is new"
    Path(uris[5]).write_bytes(b"changed")
    take_snapshot(images(uris), path, hash_files=noted)
    assert noted.read == [uris[5]]
    assert sum(name.stat().st_mtime_ns != time for name, time in before.items()) == 1
    assert set(folder.iterdir()) == set(before)


def test_a_manifest_in_one_file_is_divided_and_a_damaged_part_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    uris, path = write_images(tmp_path / "images", 60), tmp_path / "manifest.parquet"
    expected = take_snapshot(images(uris), path)[0].column("key")
    limit(monkeypatch, 16, 0)
    noted = Noted()
    assert take_snapshot(images(uris), path, hash_files=noted)[0].column("key") == expected
    assert not noted.read and not path.exists(), "the file of an older version was divided"
    part = sorted(Path(f"{path}.parts").iterdir())[1]
    count = Manifest(storage_path(path), 60).read(1).num_rows
    cut(part)
    assert take_snapshot(images(uris), path, hash_files=noted)[0].column("key") == expected
    assert len(noted.read) == count and any(str(part) in line for line in log_lines)
    write_table(storage_path(f"{path}.parts/new-1.parquet"), Manifest(storage_path(path), 60).read(2))
    cut(Path(f"{path}.parts/new-1.parquet"))
    noted.read = []
    assert take_snapshot(images(uris), path, hash_files=noted)[0].column("key") == expected
    assert not noted.read and not Path(f"{path}.parts/new-1.parquet").exists()


def test_a_part_that_another_process_removes_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part before it is read, and a file of fewer parts after its first rows: an object on S3 may end so."""
    limit(monkeypatch, 16, 2**20)
    uris, path = write_images(tmp_path / "images", 60), tmp_path / "manifest.parquet"
    dataset, noted = images(uris), Noted()
    expected = take_snapshot(dataset, path)[0]
    parts = sorted(Path(f"{path}.parts").iterdir())
    held = {row["uri"] for row in pq.read_table(parts[1]).to_pylist()}

    def read(file: StoragePath, schema: pa.Schema) -> pa.Table:
        parts[1].unlink(missing_ok=True)
        return read_cache(file, schema)

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "read_cache", read)
        assert take_snapshot(dataset, path, hash_files=noted)[0].table.equals(expected.table)
    assert {*noted.read} == held and parts[1].exists()

    def batches(file: StoragePath, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        yield next(iter(table_batches(file, schema))).slice(0, 5)
        file.delete()
        raise FileNotFoundError(2, "another process has divided it", str(file))

    limit(monkeypatch, 4, 2**20)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "table_batches", batches)
        assert take_snapshot(dataset, path, hash_files=noted)[0].table.equals(expected.table)
    assert 0 < len(noted.read) == 60 - 5 * len(parts)
    assert take_snapshot(dataset, path, hash_files=noted)[0].table.equals(expected.table)
    assert len(stored_rows(path)) == 60
