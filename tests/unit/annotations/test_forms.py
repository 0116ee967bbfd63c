"""The same images and captions in every form are the same data set, with the same content keys and pixels."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.content_keys import take_snapshot
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.formats.files import find_files
from raycap.pipeline.data.formats.splits import Splits, id_of_name
from raycap.pipeline.data.images import ImageLocation, decode_batch, is_remote_image
from raycap.pipeline.data.reading import read_annotations, read_dataset
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from raycap.pipeline.storage.untrusted.parquet_files import RowPlace
from tests.support.forms import FORMS, Captioned, add_file, scenes, write_tars


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Captioned]:
    return scenes(tmp_path_factory.mktemp("scenes") / "set", 300)


def section(root: Path | str, **keys: Any) -> DataSection:
    return DataSection(**{"root": str(root), "train_splits": ("train",), **keys})


def read_form(folder: Path, form: str, images: Sequence[Captioned]) -> Dataset:
    """The data set in one of the forms, with content keys."""
    dataset = read_dataset(section(folder, **FORMS[form](folder, images)), folder)
    keyed, unreadable = take_snapshot(dataset, folder.with_suffix(".manifest"))
    assert not unreadable and keyed.table["key"].null_count == 0
    return keyed


def sorted_by_key(dataset: Dataset) -> Dataset:
    return Dataset(dataset.table.sort_by("key"))


def pixels(dataset: Dataset, **options: Any) -> dict[str, bytes]:
    """The decoded pixels of each image by content key."""
    batch = {name: np.array(dataset.column(name)) for name in ("key", "uri")}
    decoded = decode_batch(batch, ImageTransform(32), 10**6, **options)
    assert not any(decoded["reason"])
    return {key: values.tobytes() for key, values in zip(decoded["key"], decoded["pixels"], strict=True)}


def test_every_form_is_the_same_data_set(tmp_path: Path, images: list[Captioned]) -> None:
    expected = sorted_by_key(read_form(tmp_path / "karpathy", "karpathy", images))
    expected_pixels = pixels(expected)
    for form in FORMS:
        dataset = sorted_by_key(read_form(tmp_path / form, form, images))
        for column in ("key", "split", "captions"):
            assert dataset.column(column) == expected.column(column), (form, column)
        if form != "text":  # which has no ids
            assert dataset.fingerprint() == expected.fingerprint(), form
        assert pixels(dataset) == expected_pixels, form
        references = read_references(tmp_path / form)  # of the whole folder, as `raycap score` reads it
        assert sorted(references.column("captions")) == sorted(expected.column("captions")), form
        if form not in ("metadata.jsonl", "text"):  # here only the configuration names the columns or folders
            assert set(references.source_ids()) == set(dataset.source_ids()), form
    assert len(set(expected.column("key"))) > 50


def test_forms_on_s3_are_read_by_range(tmp_path: Path, images: list[Captioned], s3: str) -> None:
    options = StorageOptions(endpoint_url=s3, region="us-east-1")
    images = images[:60]
    read: list[int] = []
    original = StoragePath.read_range
    for form in ("karpathy", "parquet", "webdataset", "text"):
        keys = FORMS[form](tmp_path / form, images)
        root = StoragePath(f"s3://data/forms/{form}", options)
        for path in sorted((tmp_path / form).rglob("*")):
            if path.is_file():
                (root / path.relative_to(tmp_path / form).as_posix()).write_bytes(path.read_bytes())
        config = section(root.uri, **(keys | ({"format": "text"} if form == "text" else {})))
        dataset, unreadable = take_snapshot(read_dataset(config, root.uri, options), tmp_path / f"{form}.m", options)
        assert not unreadable and all(map(is_remote_image, dataset.column("uri")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAYCAP_CACHE", str(tmp_path / f"{form}.cache"))  # the snapshot has cached the images
            patch.setattr(StoragePath, "read_range", lambda *each: (read.append(each[2]), original(*each))[1])
            found = pixels(dataset, options=options)
        if form == "karpathy":
            expected = {key: (split, captions) for key, split, captions in rows_of(dataset)}
            expected_pixels = found
        assert {key: (split, captions) for key, split, captions in rows_of(dataset)} == expected
        assert found == expected_pixels
    assert read and sum(read) < 4 * sum(len(image.content) for image in images)


def rows_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    return list(zip(*map(dataset.column, ("key", "split", "captions")), strict=True))


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_archives_are_those_of_tarfile(tmp_path: Path, format_: int) -> None:
    random_, path = random.Random(format_), tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format_) as archive:
        for number in range(100):
            folder = random_.choice(("", "a/", "b" * 90 + "/", "./c/"))
            name = f"{folder}{'x' * random_.choice((1, 60))}{number}.{random_.choice(('jpg', 'PNG', 'webp'))}"
            add_file(archive, name, random_.randbytes(random_.choice((0, 1, 511, 512, 513, 2000))))
            add_file(archive, name.rpartition(".")[0] + ".txt", b"a cat\r\n\n \nzwei H\xc3\xbctten")
        for kind, name in (
            (tarfile.SYMTYPE, "link.jpg"),
            (tarfile.DIRTYPE, "folder.jpg"),
            (tarfile.LNKTYPE, "hard.jpg"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            archive.addfile(member)
    dataset, problems, _ = read_annotations(section(tmp_path, annotations="a.tar"), tmp_path)
    with tarfile.open(path) as archive:
        expected = [member for member in archive if member.isreg() and not member.name.endswith(".txt")]
        contents = [archive.extractfile(member).read() for member in expected]  # type: ignore[union-attr]
    locations = [ImageLocation.parse(uri) for uri in dataset.column("uri")]
    assert [location.name for location in locations] == [member.name for member in expected] and len(expected) == 100
    assert [location.read_bytes() for location in locations] == contents
    assert dataset.column("captions") == [["a cat", "zwei Hütten"]] * 100 and not problems
    assert [location.uri for location in locations] == dataset.column("uri")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "gzip", "use_dictionary": False, "data_page_version": "2.0", "data_page_size": 5_000},
        {"compression": "lz4", "row_group_size": 37, "write_batch_size": 8, "data_page_size": 3_000},
        {"compression": "brotli", "dictionary_pagesize_limit": 3_000, "write_batch_size": 8, "write_page_index": True},
    ],
)
@pytest.mark.parametrize("is_struct", [True, False])
def test_images_in_parquet_are_those_that_arrow_reads(tmp_path: Path, options: dict[str, Any], is_struct: bool) -> None:
    random_, count = random.Random(str(options)), 200
    contents = [random_.randbytes(random_.choice((0, 1, 100, 900))) for _ in range(count)]
    contents = [random_.choice((content, contents[0], b"twice")) for content in contents]
    values: list[Any] = [random_.choice((content, content, content, None)) for content in contents]
    column = [value if value is None else {"bytes": value, "path": f"{n}.jpg"} for n, value in enumerate(values)]
    if is_struct:
        column = [random_.choice((each, each, {"bytes": None, "path": None})) for each in column]
    table = pa.table(
        {"picture": column if is_struct else pa.array(values, pa.large_binary()), "text": ["a cat"] * count}
    )
    pq.write_table(table, tmp_path / "a.parquet", **options)
    config = section(tmp_path, annotations="a.parquet", columns={"image": "picture"})
    dataset = read_annotations(config, tmp_path).dataset
    expected = pq.read_table(tmp_path / "a.parquet")["picture"].to_pylist()
    for uri, value in zip(dataset.column("uri"), expected, strict=True):
        content = value["bytes"] if isinstance(value, dict) else value
        location = ImageLocation.parse(uri)
        assert location.uri == uri
        if content is None:
            with pytest.raises(OSError, match="the row has no bytes"):
                location.read_bytes()
        else:
            assert location.read_bytes(1000) == content


def test_locations_are_unambiguous_whatever_the_names(tmp_path: Path) -> None:
    random_ = random.Random(0)
    for _ in range(300):
        file = "/" + "".join(random_.choices("a/:+%1 \nü{", k=random_.randrange(1, 20)))
        file = random_.choice((file, f"s3://b{file}"))
        name = "".join(random_.choices("a/:+1.\n", k=random_.randrange(20)))
        number = random_.randrange(10**15)
        parts = (number, 7), RowPlace(number % 10**9, 2, 3)
        for part in parts:
            location = ImageLocation(StoragePath(file), part, name)
            parsed = ImageLocation.parse(location.uri)
            assert parsed == location and parsed.name == name and parsed.uri == location.uri
            assert is_remote_image(location.uri) == file.startswith("s3://")
        assert ImageLocation.parse(file) == ImageLocation(StoragePath(file))
    for text in ("tar:", "tar:1+2:/a", "parquet:1+2:/a", "tar:-1+2+1:/a"):
        with pytest.raises(ValueError, match="is not the location of an image"):
            ImageLocation.parse(text)


def test_a_replaced_archive_is_read_again(tmp_path: Path, images: list[Captioned]) -> None:
    for form in ("webdataset", "parquet"):
        folder = tmp_path / form
        keys = read_form(folder, form, images[:30]).column("key")
        dataset = read_dataset(section(folder, **FORMS[form](folder, images[30:])), folder)
        keyed, unreadable = take_snapshot(dataset, folder.with_suffix(".manifest"))
        assert not unreadable and not set(keyed.column("key")) & set(keys)
        assert all("changed while" in reason for reason in pixels_reasons(dataset, keys))


def pixels_reasons(dataset: Dataset, keys: list[str]) -> list[str]:
    batch = {"key": np.array(keys), "uri": np.array(dataset.column("uri")[: len(keys)])}
    return [str(reason) for reason in decode_batch(batch, ImageTransform(32), 10**6)["reason"]]


def test_cut_and_missing_archives_are_reasons_of_their_images(tmp_path: Path, images: list[Captioned]) -> None:
    dataset = read_dataset(section(tmp_path, **write_tars(tmp_path, images)), tmp_path)
    path = tmp_path / "shard-002.tar"
    path.write_bytes(path.read_bytes()[:2_000])
    (tmp_path / "shard-001.tar").unlink()
    keyed, unreadable = take_snapshot(dataset, tmp_path / "manifest")
    assert len(keyed.readable()) < len(keyed) == len(images) and len(unreadable) >= 35
    assert {reason.split(": ")[-1] for reason in unreadable.values()} >= {"No such file or directory"}
    assert any("ends before it" in reason for reason in unreadable.values())


def test_adding_images_moves_no_image_to_another_split(tmp_path: Path, images: list[Captioned]) -> None:
    fractions = {"train": 0.8, "val": 0.1, "test": 0.1}
    names = [f"images/{number}.jpg" for number in range(20_000)]
    splits = Splits({}, fractions, 0)
    drawn = {name: splits.drawn(name) for name in names}
    counts = {split: sum(each == split for each in drawn.values()) / len(names) for split in fractions}
    assert all(abs(counts[split] - fraction) < 0.01 for split, fraction in fractions.items())
    assert drawn == {name: Splits({}, dict(reversed(fractions.items())), 0).drawn(name) for name in names}
    assert drawn != {name: Splits({}, fractions, 1).drawn(name) for name in names}
    assert Splits().drawn("x") == "train"

    def read(count: int) -> dict[int, str]:
        rows = [f'{{"image": "{name}", "text": "a"}}\n' for name in names[:count]]
        (tmp_path / "t.jsonl").write_text("".join(reversed(rows)))
        config = section(tmp_path, annotations="t.jsonl", split_fractions=fractions)
        dataset = read_annotations(config, tmp_path).dataset
        return dict(zip(dataset.column("image_id"), dataset.column("split"), strict=True))

    few, many = read(100), read(300)
    assert few == {image_id: many[image_id] for image_id in few}
    assert many == {id_of_name(name): drawn[name] for name in names[:300]} and set(many.values()) == set(fractions)
    assert all(0 <= image_id < 2**63 for image_id in many)


def test_a_column_map_names_the_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("datei,Bildtext,text,nummer,teil\na.jpg,ein Hund,x,7,val\n")
    columns = {"image": "datei", "captions": "Bildtext", "id": "nummer", "split": "teil"}
    dataset = read_annotations(section(tmp_path, annotations="t.csv", columns=columns), tmp_path).dataset
    assert dataset.table.drop_columns(["uri", "key"]).to_pylist() == [
        {"image_id": 7, "split": "val", "captions": ["ein Hund"]}
    ]
    with pytest.raises(UserError, match=r"row 1 has no column 'Titel' \(data.columns.captions\); it has"):
        columns = {"image": "datei", "captions": "Titel"}
        read_annotations(section(tmp_path, annotations="t.csv", columns=columns), tmp_path)


def test_patterns_name_files(tmp_path: Path) -> None:
    for name in ("a/s-008.tar", "a/s-009.tar", "a/s-010.tar", "b/s-1.tar", "{x}.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    root = StoragePath(str(tmp_path))
    assert find_files(root, "a/s-{008..010}.tar") == ["a/s-008.tar", "a/s-009.tar", "a/s-010.tar"]
    assert find_files(root, "{b,a}/s-*.tar") == ["b/s-1.tar", *(f"a/s-0{n}.tar" for n in ("08", "09", "10"))]
    assert find_files(root, "**/s-?.tar") == ["b/s-1.tar"] and find_files(root, "none.tar") == ["none.tar"]
    assert find_files(root, "{x}.tar") == ["{x}.tar"]
    assert find_files(root, "{8..10}") == ["8", "9", "10"]
    for pattern, problem in (
        ("c/*.tar", "matches no file"),
        ("{1..999999999}", "more than 100000"),
        ("{2..1}", "matches"),
    ):
        with pytest.raises(UserError, match=problem):
            find_files(root, pattern)
