"""Folders in which a data set is beside other files, or has parts that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.survey.survey import survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import storage_path
from raycap.pipeline.storage.s3 import StorageOptions
from tests.support.forms import FORMS, Captioned, scenes, write_images

SPLITS = [{"annotations": split, "split": split} for split in ("test", "train", "val")]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Captioned]:
    """60 scenes in the splits that most data sets have."""
    found = scenes(tmp_path_factory.mktemp("scenes") / "set")
    return [image._replace(split=image.split.replace("novel", "test")) for image in found]


def write_texts(folder: Path, images: list[Captioned]) -> None:
    """Images and texts in one folder."""
    write_images(folder, images)
    for image in images:
        (folder / image.name).with_suffix(".txt").write_text("\n".join(image.captions))


def test_images_without_a_caption_are_counted(tmp_path: Path, images: list[Captioned]) -> None:
    write_texts(tmp_path, images)
    for image in images[4:7]:
        (tmp_path / image.name).with_suffix(".txt").unlink()
    with pytest.raises(UserError) as error:
        survey(str(tmp_path))
    expected = f"3 of 60 images have no caption (text beside images), first {tmp_path / images[4].name}; add"
    assert expected in str(error.value)


@pytest.mark.parametrize("below", ["", "nest"])
def test_other_images_do_not_dissolve_the_folders_of_splits(
    tmp_path: Path, images: list[Captioned], below: str
) -> None:
    FORMS["text"](tmp_path / below, images)
    write_images(tmp_path / below / "logo", [images[0]._replace(name="logo.png")])
    found = survey(str(tmp_path))
    sources = [source | {"annotations": f"{below}/{source['annotations']}".strip("/")} for source in SPLITS]
    assert found.keys == {"format": "text", "sources": sources}
    assert len(found.dataset) == 60 and found.left_out == (f"{below}/logo/logo.png".strip("/"),)


def test_folders_without_texts_are_left_out(tmp_path: Path, images: list[Captioned]) -> None:
    write_texts(tmp_path / "one", images[:30])
    write_texts(tmp_path / "two" / "deep", images[30:])
    assert survey(str(tmp_path)).keys["annotations"] == "."
    write_images(tmp_path / "logo", [images[0]._replace(name="logo.png")])
    found = survey(str(tmp_path))
    assert found.keys["sources"] == [{"annotations": "one"}, {"annotations": "two"}]
    assert len(found.dataset) == 60 and found.left_out == ("logo/logo.png",)
    write_images(tmp_path, [images[0]._replace(name="root.png")])
    assert survey(str(tmp_path)).left_out == ("logo/logo.png", "root.png")


def test_folders_of_splits_on_s3(tmp_path: Path, images: list[Captioned], s3: str) -> None:
    options = StorageOptions(endpoint_url=s3, region="us-east-1")
    FORMS["text"](tmp_path, images)
    place = storage_path("s3://data/init-text", options)
    for path in tmp_path.rglob("*.*"):
        (place / path.relative_to(tmp_path).as_posix()).write_bytes(path.read_bytes())
    found = survey(place.uri, options)
    assert found.keys == {"format": "text", "sources": SPLITS} and len(found.dataset) == 60


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.parquet", b"broken"),
        ("log.jsonl", b'{"loss": 1}\n'),
        ("log.jsonl", b"{broken\n"),
        ("a.csv", b'"' + b"x" * 200_000 + b'",b\n'),
        ("captions.json", b"[]"),
        ("old.tar.gz", b"\x1f\x8b" + b"x" * 600),
    ],
)
def test_a_table_that_is_no_data_set_hides_none(
    tmp_path: Path, images: list[Captioned], name: str, content: bytes
) -> None:
    write_texts(tmp_path, images)
    (tmp_path / name).write_bytes(content)
    found = survey(str(tmp_path))
    assert found.form == "text beside images" and len(found.dataset) == 60 and found.left_out == (name,)


def test_a_table_in_a_lower_folder_is_found(tmp_path: Path, images: list[Captioned]) -> None:
    for split in ("train", "val", "test"):
        FORMS["metadata.jsonl"](tmp_path / split, [image for image in images if image.split == split])
    (tmp_path / "stats.jsonl").write_text('{"loss": 1}\n')
    found = survey(str(tmp_path))
    assert len(found.dataset) == 60 and found.left_out == ("stats.jsonl",)


def test_annotations_that_are_not_used_are_named(tmp_path: Path, images: list[Captioned]) -> None:
    for name, part in (("a", images[:30]), ("b", images[30:])):
        rows = [{"image": {"bytes": image.content, "path": image.name}, "caption": image.captions} for image in part]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    found = survey(str(tmp_path))
    assert len(found.dataset) == 30 and found.left_out == ("b.parquet",)
    assert survey(str(tmp_path / "b.parquet")).left_out == ()


@pytest.mark.parametrize("place", ["se\nt", "set"])
def test_a_name_that_no_configuration_can_have(tmp_path: Path, images: list[Captioned], place: str) -> None:
    write_images(tmp_path / place / "pho\ntos", images)
    rows = [{"image": image.name, "caption": image.captions[0]} for image in images]
    (tmp_path / place / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"a configuration cannot contain the name '.*\\n.*'.*; rename it"):
        survey(str(tmp_path / place))


@pytest.mark.parametrize("ending", ["png", "csv", "doc"])
def test_names_that_are_not_utf_8(tmp_path: Path, images: list[Captioned], ending: str) -> None:
    name = os.fsdecode(b"caf\xe9." + ending.encode())
    write_texts(tmp_path, images)
    (tmp_path / name).write_bytes(images[0].content)
    if ending != "png":
        assert len(survey(str(tmp_path)).dataset) == 60
        return
    with pytest.raises(UserError, match="has a name that is not text in UTF-8; rename it"):
        survey(str(tmp_path))


def test_a_split_by_the_name_of_the_file_is_not_divided(tmp_path: Path, images: list[Captioned]) -> None:
    FORMS["coco"](tmp_path, [image._replace(split="train2017") for image in images])
    with pytest.raises(UserError, match=r"put all 60 images into the split train, .*set data.split_lists"):
        survey(str(tmp_path))


@pytest.mark.parametrize("count", [3, 4, 6, 10])
def test_a_small_data_set_is_divided_by_the_first_seed_that_fits(
    tmp_path: Path, images: list[Captioned], count: int
) -> None:
    write_texts(tmp_path, images[:count])
    found = survey(str(tmp_path))
    assert set(found.dataset.column("split")) == {"train", "val", "test"}
    for seed in range(found.keys.get("split_seed", 0)):
        section = DataSection(root=str(tmp_path), **found.keys | {"split_seed": seed})
        assert len(set(read_annotations(section, tmp_path)[0].column("split"))) < 3
    if count < 10:
        assert found.keys["split_seed"] > 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"image;caption\nx.jpg;a cat\n", "has one column, 'image;caption'; separate the columns by commas"),
        ("a.csv", b"image,caption\nhttps://h/x.jpg,a cat\n", "names images on the web such as .*x.jpg; download them"),
        ("a.csv", b"image,words\nx.jpg,a cat\n", "set data.columns.captions.; the columns are image, words"),
        ("a.tar.gz", b"\x1f\x8b" + b"x" * 600, "is compressed by gzip; unpack it"),
    ],
)
def test_messages_name_the_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "x.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        survey(str(tmp_path))
