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
