"""Folders in which a data set is beside other files, or has parts that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycap.pipeline.data.survey import survey
from raycap.pipeline.errors import UserError
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
    assert len(found.dataset) == 60


def test_folders_without_texts_are_left_out(tmp_path: Path, images: list[Captioned]) -> None:
    write_texts(tmp_path / "one", images[:30])
    write_texts(tmp_path / "two" / "deep", images[30:])
    assert survey(str(tmp_path)).keys["annotations"] == "."
    write_images(tmp_path / "logo", [images[0]._replace(name="logo.png")])
    found = survey(str(tmp_path))
    assert found.keys["sources"] == [{"annotations": "one"}, {"annotations": "two"}]
    assert len(found.dataset) == 60


def test_a_table_in_a_lower_folder_is_found(tmp_path: Path, images: list[Captioned]) -> None:
    for split in ("train", "val", "test"):
        FORMS["metadata.jsonl"](tmp_path / split, [image for image in images if image.split == split])
    (tmp_path / "stats.jsonl").write_text('{"loss": 1}\n')
    found = survey(str(tmp_path))
    assert len(found.dataset) == 60


def test_a_split_by_the_name_of_the_file_is_not_divided(tmp_path: Path, images: list[Captioned]) -> None:
    FORMS["coco"](tmp_path, [image._replace(split="train2017") for image in images])
    with pytest.raises(UserError, match=r"put all 60 images into the split train, .*set data.split_lists"):
        survey(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"image;caption\nx.jpg;a cat\n", "has one column, 'image;caption'; separate the columns by commas"),
        ("a.csv", b"image,caption\nhttps://h/x.jpg,a cat\n", "names images on the web such as .*x.jpg; download them"),
        ("a.csv", b"image,words\nx.jpg,a cat\n", "set data.columns.captions.; the columns are image, words"),
        ("a.tar.gz", b"\x1f\x8b" + b"x" * 600, "unpack it to a plain tar"),
    ],
)
def test_messages_name_the_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "x.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        survey(str(tmp_path))
