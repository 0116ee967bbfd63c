"""What `raycap init` sees in a folder: keys that names suggest, parts that cannot be used, the captions' language."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from raycap.pipeline.data.first_configuration import detect_language
from raycap.pipeline.data.formats.source import find_files
from raycap.pipeline.data.survey import find_candidates, read_names, survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath, storage_path
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
    assert found.left_out == ["1 images that no annotation names are not used, first logo/logo.png"]


def test_a_folder_of_images_may_be_a_link_and_its_names_those_of_macos(tmp_path: Path, images: list[Captioned]) -> None:
    write_images(tmp_path / "disk", [image._replace(name=f"e\u0301{image.name}") for image in images])
    (tmp_path / "set").mkdir()
    (tmp_path / "set/images").symlink_to("../disk")
    rows = [f"\u00e9{image.name},a cat\n" for image in images]
    (tmp_path / "set/captions.csv").write_text("image,caption\n" + "".join(rows))
    found = survey(str(tmp_path / "set"))
    assert found.keys["images"] == "images" and len(found.dataset) == 60 and not found.left_out
    assert all(Path(uri).exists() for uri in found.dataset.column("uri"))


@pytest.mark.parametrize(
    ("folders", "keys"),
    [
        (("train", "validation", "test"), {"split_by_folder": True}),
        (("Train", "VAL", "Testing"), {"split_by_folder": True}),
        (("train", "dev"), {"split_by_folder": True, "test_splits": ["val"]}),
        (("train", "test"), {"split_by_folder": True, "split_fractions": {"train": 0.9, "val": 0.1}}),
        (("cats", "dogs"), {"split_fractions": {"train": 0.8, "val": 0.1, "test": 0.1}}),
        (("test", "test/deep"), {"split_fractions": {"train": 0.8, "val": 0.1, "test": 0.1}}),
    ],
)
def test_folders_of_a_table_name_splits(
    tmp_path: Path, images: list[Captioned], folders: tuple[str, ...], keys: dict[str, object]
) -> None:
    rows = []
    for number, image in enumerate(images):
        folder = folders[0 if number < 40 else number % len(folders)]
        write_images(tmp_path / "set" / folder, [image])
        rows.append(f"{folder}/{image.name},a cat\n")
    (tmp_path / "set/metadata.csv").write_text("file_name,text\n" + "".join(rows))
    found = survey(str(tmp_path / "set"))
    assert found.keys == {"annotations": "metadata.csv", **keys}
    for split, uri in zip(found.dataset.column("split"), found.dataset.column("uri"), strict=True):
        folder = Path(uri).parent.name.lower()
        assert (
            not keys.get("split_by_folder")
            or folder[:3] not in ("val", "dev", "tes")
            or folder[:2] == split[:2]
            or (folder, split) == ("dev", "val")
        )


def test_every_split_of_a_table_is_used(tmp_path: Path, images: list[Captioned]) -> None:
    write_images(tmp_path, images)
    splits = [" Train", "TRAIN", "dev", "Eval", "extra", "train"]
    rows = [f"{image.name},a cat,{splits[number % 6]}\n" for number, image in enumerate(images)]
    (tmp_path / "t.csv").write_text("image,caption,split\n" + "".join(rows))
    keys = survey(str(tmp_path)).keys
    assert keys == {"annotations": "t.csv", "val_split": "dev", "test_splits": ["eval", "extra"]}


TABLE, PARTS = b"image,caption\n", ["part1/metadata.csv", "part2/metadata.csv"]


def write(folder: Path, names: list[str]) -> StoragePath:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(TABLE)
    return storage_path(folder)


@pytest.mark.parametrize("seed", range(15))
def test_the_keys_name_exactly_the_files_of_a_candidate(tmp_path: Path, seed: int) -> None:
    """The patterns are compared with what the readers find by them."""
    draw = random.Random(seed)
    words = ["train", "val", "part", "part1", "a", "[b]", "{c,d}", "12", "x*"]
    names = {
        "/".join("-".join(draw.choices(words, k=draw.randint(1, 2))) for _ in range(draw.randint(1, 2))) + ".csv"
        for _ in range(draw.randint(1, 8))
    }
    root = write(tmp_path, sorted(names))
    for candidate in find_candidates(sorted(names)):
        _, keys = read_names(root, candidate, sorted(names))
        found = [name for each in keys.get("sources", [keys]) for name in find_files(root, each["annotations"])]
        assert sorted(found) == sorted(candidate.files)


CAPTIONS = {
    "en": ("LATIN", ["A dog runs on the grass.", "Two men with a ball in the park"]),
    "de": ("LATIN", ["Ein Hund läuft auf der Wiese.", "Zwei Männer mit einem Ball sind im Park"]),
    "fr": ("LATIN", ["Un chien court dans le parc.", "Deux hommes avec une balle sur la plage"]),
    "es": ("LATIN", ["Un perro corre en el parque.", "Dos hombres con una pelota en la playa"]),
    "vi": ("LATIN", ["Một con chó đang chạy trên cỏ", "Hai người đàn ông với một quả bóng"]),
    "ru": ("CYRILLIC", ["Собака бежит по траве", "Двое мужчин с мячом"]),
    "zh": ("CJK", ["一只狗在草地上奔跑", "两个男人在公园里踢球"]),
    "ja": ("HIRAGANA", ["犬が草の上を走っている", "公園でボールで遊ぶ二人の男性"]),
    "ko": ("HANGUL", ["개가 잔디 위를 달린다", "공을 가진 두 남자"]),
    "th": ("THAI", ["สุนัขวิ่งบนหญ้า", "ผู้ชายสองคนกับลูกบอล"]),
    "hi": ("DEVANAGARI", ["एक कुत्ता घास पर दौड़ रहा है"]),
    "ar": ("ARABIC", ["كلب يركض على العشب"]),
    "el": ("GREEK", ["Ένας σκύλος τρέχει στο γρασίδι"]),
}


@pytest.mark.parametrize("code", CAPTIONS)
def test_languages_and_their_tokenizers(code: str) -> None:
    script, captions = CAPTIONS[code]
    language = detect_language(captions)
    assert (language.script, language.code) == (script, code)
    wanted = {"en": "expansionnet", "zh": "characters", "ja": "characters", "th": "characters"}
    assert language.tokenizer == wanted.get(code, "unicode")


@pytest.mark.parametrize(
    "captions",
    [
        ["En hund springer på gräset", "Två män med en boll i parken", "En kvinna sitter på en bänk"],  # Swedish
        ["En hund løper på gresset", "To menn med en ball i parken"],  # Norwegian
        ["Un câine aleargă pe iarbă", "Un om cu o minge"],  # Romanian
        ["Seorang pria di taman", "Anjing berlari di rumput"],  # Indonesian
        ["un con una"],  # Spanish and Italian
        ["the xxx yyy zzz"],
    ],
)
def test_a_language_without_a_clear_margin_is_unknown(captions: list[str]) -> None:
    assert detect_language(captions).code is None
