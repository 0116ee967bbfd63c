"""What `raycap init` sees in a folder: keys that names suggest, parts that cannot be used, the captions' language."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.jobs.cli import main
from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data.first_configuration import detect_language
from raycap.pipeline.data.formats.files import find_files
from raycap.pipeline.data.formats.source import as_list
from raycap.pipeline.data.formats.splits import Splits
from raycap.pipeline.data.reading import read_annotations
from raycap.pipeline.data.survey import find_candidates, read_names, read_references, survey
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath, storage_path
from tests.support.forms import FORMS, Captioned, scenes, write_images

SPLITS = ("test", "train", "val")


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
    sources = [{"annotations": f"{below}/{split}".strip("/")} for split in SPLITS]
    assert found.keys == {"format": "text", "sources": sources, "split_by_folder": True}
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


def test_texts_may_be_in_folders_like_those_of_the_images(tmp_path: Path, images: list[Captioned]) -> None:
    write_texts(tmp_path / "all", images)
    for text in [*(tmp_path / "all").glob("**/*.txt")]:
        place = tmp_path / "captions" / text.relative_to(tmp_path / "all")
        place.parent.mkdir(parents=True, exist_ok=True)
        text.rename(place)
    (tmp_path / "captions" / "further.txt").write_text("a text of no image")
    found = survey(str(tmp_path))
    assert found.keys.items() >= {"format": "text", "annotations": "captions", "images": "all"}.items()
    expected = {str(tmp_path / "all" / image.name): list(image.captions) for image in images}
    assert dict(zip(found.dataset.column("uri"), found.dataset.column("captions"), strict=True)) == expected
    assert found.left_out == ["1 texts beside no image are not used, first further.txt"]


@pytest.mark.parametrize("place", ["images/{split}", "{split}2017", "{split}/images"])
def test_images_of_equal_names_are_those_of_the_split(tmp_path: Path, images: list[Captioned], place: str) -> None:
    for split in ("train", "val", "test"):
        part = [image._replace(name=f"{n}.png") for n, image in enumerate(i for i in images if i.split == split)]
        write_images(tmp_path / place.format(split=split), part)
        folder = tmp_path / (split if place.endswith("images") else "annotations")
        folder.mkdir(exist_ok=True)
        rows = ({"image": image.name, "captions": list(image.captions)} for image in part)
        (folder / f"captions_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = survey(str(tmp_path))
    wanted = {image.split: place.format(split=image.split) for image in images}
    for uri, split in zip(found.dataset.column("uri"), found.dataset.column("split"), strict=True):
        assert Path(uri).parent == tmp_path / wanted[split]
    assert found.left_out == []


def test_lists_of_flickr8k_are_its_splits(tmp_path: Path, images: list[Captioned]) -> None:
    write_images(tmp_path / "Images", images)
    lines = [f"{image.name}#{n}\t{text}\n" for image in images for n, text in enumerate(image.captions)]
    (tmp_path / "Flickr8k.token.txt").write_text("".join(lines))
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test")):
        names = [f"{image.name}\n" for image in images if image.split == split]
        (tmp_path / f"Flickr_8k.{name}Images.txt").write_text("".join(names))
    found = survey(str(tmp_path))
    expected = {str(tmp_path / "Images" / image.name): image.split for image in images}
    assert dict(zip(found.dataset.column("uri"), found.dataset.column("split"), strict=True)) == expected


def test_files_without_captions_hide_no_others(tmp_path: Path, images: list[Captioned]) -> None:
    write_images(tmp_path, images)
    (tmp_path / "train.csv").write_text("image,caption\n" + "".join(f"{i.name},{i.captions[0]}\n" for i in images))
    (tmp_path / "test.csv").write_text("image\nx.png\n")
    assert survey(str(tmp_path)).left_out == ["1 other annotation files are not used, first test.csv"]
    (tmp_path / "train.csv").unlink()
    lists = [{"image": image.name, "caption": image.captions[0]} for image in images]
    (tmp_path / "set_train.json").write_text(json.dumps(lists))
    (tmp_path / "set_gt.json").write_text(json.dumps({"images": [{"id": 1}], "annotations": []}))
    assert len(survey(str(tmp_path)).dataset) == len(images)


def test_a_second_annotation_file_is_counted(tmp_path: Path, images: list[Captioned]) -> None:
    FORMS["metadata.jsonl"](tmp_path, images)
    (tmp_path / "zoo.csv").write_text(f"image,caption\n{images[0].name},a cat\n")
    assert survey(str(tmp_path)).left_out == ["1 other annotation files are not used, first zoo.csv"]
    (tmp_path / "a.arrow").touch()
    found = survey(str(tmp_path))
    assert len(found.dataset) == len(images) and "a.arrow" in found.left_out[0] and len(found.left_out) == 2


def test_split_lists_that_contradict_each_other_are_named_and_endings_may_be_missing(
    tmp_path: Path, images: list[Captioned]
) -> None:
    write_images(tmp_path, images)
    (tmp_path / "a.csv").write_text("image,caption\n" + "".join(f"{image.name},a cat\n" for image in images))
    splits = {"train": images[:40], "val": images[40:50], "test": images[50:]}
    for split, part in splits.items():
        (tmp_path / f"{split}.txt").write_text("".join(f"{image.name.partition('.')[0]}\n" for image in part))
    assert survey(str(tmp_path)).dataset.split_sizes() == {split: len(part) for split, part in splits.items()}
    assert len(read_references(tmp_path, "val")) == 10
    (tmp_path / "zz_dev.txt").write_text(f"{images[45].name}\n")
    assert survey(str(tmp_path)).left_out == ["1 further lists of a split are not used, first zz_dev.txt"]
    with (tmp_path / "val.txt").open("a") as file:
        file.write(images[0].name.partition(".")[0])
    with pytest.raises(UserError, match="is in .* and again in"):
        survey(str(tmp_path))


def test_ids_of_captions_are_no_ids_of_images(tmp_path: Path, images: list[Captioned]) -> None:
    write_images(tmp_path, images)
    rows = [f"{n}{k};{i.name};{text};\n" for n, i in enumerate(images) for k, text in enumerate(i.captions)]
    (tmp_path / "a.csv").write_text("sep=;\nid;image;caption;\n" + "".join(rows) + ";;;\n")
    found = survey(str(tmp_path))
    assert found.dataset.source_ids() == [image.name for image in images]
    assert found.left_out[0].startswith("1 columns with an id of each caption are not used, first ")


def test_other_columns_with_captions_are_counted_and_image_id_is_the_id(
    tmp_path: Path, images: list[Captioned]
) -> None:
    write_images(tmp_path, images)
    rows = [{"image": i.name, "image_id": f"coco_{i.image_id}", "caption": "a", "caption_zh": "b"} for i in images]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    found = survey(str(tmp_path))
    assert found.dataset.source_ids() == [f"coco_{i.image_id}" for i in images]
    assert found.left_out == ["1 columns with texts are not used, first caption_zh in train.json"]


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


def write(folder: Path, names: list[str]) -> StoragePath:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"image,caption\n")
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
    for candidate in find_candidates(root, sorted(names)):
        _, keys = read_names(root, candidate, sorted(names))
        found = [name for each in keys.get("sources", [keys]) for name in find_files(root, each["annotations"])]
        assert sorted(found) == sorted(candidate.files)


NAMES = [f"{number}.jpg" for number in range(40)]
TEXTS = {  # five captions without tabs and line ends, as people write them
    name: [
        f"A dog, brown, and {name[0]} cats",
        "it's a dog",
        '"Stop" on a sign',
        'Un café | bar; a 5" screen',
        "[sic] a dog",
    ]
    for name in NAMES
}
PAIRS = [(name, caption) for name in NAMES for caption in TEXTS[name]]


def delimited(header: list[str], rows: list[list[Any]], delimiter: str = ",", **options: Any) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, **options).writerows([header, *rows])
    return file.getvalue()


def joined(*rows: str) -> str:
    return "".join(f"{row}\n" for row in rows)


def coco(names: list[str]) -> str:
    images = [{"id": int(name[:-4]), "file_name": name} for name in names]
    entries = [{"image_id": int(name[:-4]), "caption": caption} for name in names for caption in TEXTS[name]]
    return json.dumps({"info": {"year": 2014}, "licenses": [], "images": images, "annotations": entries})


def numpy_list(captions: list[str]) -> str:
    lines = "\n ".join(map(repr, captions))
    return f"[{lines}]"


LISTS = [{"image": name, "caption": TEXTS[name]} for name in NAMES]
ONE_BY_ONE = [{"image": name, "caption": text, "image_id": f"coco_{name[:-4]}"} for name, text in PAIRS]
TABLES: dict[str, str] = {  # {file name: content}; a word in brackets tells apart files of one name
    "LAVIS/coco_karpathy.json": json.dumps(ONE_BY_ONE),
    "LAVIS lists/flickr30k.json": json.dumps(LISTS, indent=1),
    "numbers/all.json": json.dumps([{**row, "image_id": n} for n, row in enumerate(LISTS)]),
    "lines/train_data.json": joined(*map(json.dumps, LISTS)),
    "lines/captions.txt": joined(*map(json.dumps, ONE_BY_ONE)),
    "other columns/x.json": json.dumps([{"Filename": name, "Sentence": text} for name, text in PAIRS]),
    "COCO/my_pictures.json": coco(NAMES),
    "Flickr8k/Flickr8k.token.txt": joined(
        *(f"{name}#{n}\t{text}" for name in NAMES for n, text in enumerate(TEXTS[name]))
    ),
    "Flickr30k/results_20130124.token": joined(
        *(f"{name}#{n}\t{text}" for name in NAMES for n, text in enumerate(TEXTS[name]))
    ),
    "Kaggle/captions.txt": joined("image,caption", *(f"{name},{text}" for name, text in PAIRS)),
    "Kaggle, CRLF and BOM/captions.txt": "\ufeffimage,caption\r\n"
    + "".join(f"{name},{text}\r\n" for name, text in PAIRS),
    "Kaggle, quoted/captions.txt": delimited(["image", "caption"], [list(pair) for pair in PAIRS]),
    "Kaggle 30k/results.csv": joined(
        "image_name| comment_number| comment", *(f"{name}| {n % 5}| {text}" for n, (name, text) in enumerate(PAIRS))
    ),
    "captions first/captions.csv": delimited(["caption", "image"], [[text, name] for name, text in PAIRS]),
    "tabs/captions.tsv": joined("image\tcaption", *(f"{name}\t{text}" for name, text in PAIRS)),
    "pandas' tabs/captions.tsv": delimited(["", "image", "caption"], [[0, *pair] for pair in PAIRS], "\t"),
    "semicolons/captions.csv": delimited(["image", "caption"], [list(pair) for pair in PAIRS], ";"),
    "no names/pairs.caption": joined(*(f"{name}\t{text}" for name, text in PAIRS)),
    "numbers of columns/c.csv": delimited(
        [" Image ", *(f"caption_{n}" for n in range(5)), "caption_5"], [[name, *TEXTS[name], ""] for name in NAMES]
    ),
    "numbers of comments/c.tsv": delimited(
        ["FILE", *(f"Comment{n}" for n in range(1, 6))], [[name, *TEXTS[name]] for name in NAMES], "\t"
    ),
    "JSON in a cell/c.csv": delimited(["image", "captions"], [[name, json.dumps(TEXTS[name])] for name in NAMES]),
    "Python in a cell/c.csv": delimited(["image", "captions"], [[name, str(TEXTS[name])] for name in NAMES]),
    "NumPy in a cell/c.csv": delimited(["image", "captions"], [[name, numpy_list(TEXTS[name])] for name in NAMES]),
}


def write_photographs(folder: Path, files: dict[str, bytes | str]) -> None:
    (folder / "photos").mkdir()
    for name in NAMES:
        (folder / "photos" / name).touch()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("is_file", [False, True])
def test_annotations_that_people_have_are_one_data_set(tmp_path: Path, form: str, is_file: bool) -> None:
    file = tmp_path / form.rpartition("/")[2]
    others = {
        "package.json": '{"name": "x", "images": {"a": 1}}',
        "list.json": '[{"name": "x", "version": "1"}]',
        "notes.txt": "Photographs, taken by us\n0.jpg",
    }
    write_photographs(tmp_path, {**others, file.name: TABLES[form]})
    found = survey(str(file if is_file else tmp_path))
    assert found.keys["images"] == "photos" and found.keys["annotations"] == file.name
    read, problems, left_out = read_annotations(DataSection(root=str(tmp_path), **found.keys), tmp_path)
    assert read.table.equals(found.dataset.table) and not problems and not left_out
    assert dict(zip(read.column("uri"), read.column("captions"), strict=True)) == {
        str(tmp_path / "photos" / name): captions for name, captions in TEXTS.items()
    }
    splits = [Splits({}, found.keys["split_fractions"], 0).drawn(f"photos/{name}") for name in NAMES]
    assert read.column("split") == splits


def test_of_flickr8k_the_raw_captions_are_read(tmp_path: Path) -> None:
    raw = TABLES["Flickr8k/Flickr8k.token.txt"]
    files = {
        "Flickr8k.token.txt": raw,
        "Flickr8k.lemma.token.txt": raw.lower(),
        "Flickr_8k.trainImages.txt": joined(*NAMES),
        "CrowdFlowerAnnotations.txt": joined(*(f"{name}\t{name}#1\t0.2\t1\t3" for name in NAMES)),
        "ExpertAnnotations.txt": joined(*(f"{name}\t{name}#1\t1\t1\t1" for name in NAMES)),
        "readme.txt": "If you use this, please cite: Framing image description, 2013\n",
    }
    write_photographs(tmp_path, {f"Flickr8k_text/{name}": content for name, content in files.items()})
    found = survey(str(tmp_path))
    assert found.keys["annotations"] == "Flickr8k_text/Flickr8k.token.txt"
    assert found.dataset.column("captions") == list(TEXTS.values())


def test_a_row_without_a_caption_is_reported(tmp_path: Path) -> None:
    """Line 20,000 of the results.csv of Flickr30k lacks a delimiter."""
    table = TABLES["Kaggle 30k/results.csv"].replace("0.jpg| 4| ", "0.jpg| 4   ", 1)
    write_photographs(tmp_path, {"results.csv": table})
    found = survey(str(tmp_path))
    assert found.dataset.column("captions")[0] == TEXTS["0.jpg"][:4]
    assert found.left_out == [f"1 rows without a caption are not used, first {tmp_path / 'results.csv'}: row 5"]


def test_parquet_may_name_image_files(tmp_path: Path) -> None:
    """As `Dataset.to_parquet` writes images that are files."""
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": None, "path": name} for name in NAMES], kind)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"image": images, "Caption": list(TEXTS.values())}), tmp_path / "data/train.parquet")
    write_photographs(tmp_path, {})
    found = survey(str(tmp_path))
    assert found.keys["images"] == "photos" and found.dataset.column("captions") == list(TEXTS.values())
    assert found.dataset.column("uri")[7] == str(tmp_path / "photos/7.jpg")


@settings(deadline=None)  # the machine may be busy
@given(
    captions=st.lists(
        st.text(st.sampled_from("ab ,;|\t\"'[]\n\r\\\u2028é"), min_size=1, max_size=12), min_size=1, max_size=6
    ),
    delimiter=st.sampled_from(",;|\t"),
)
def test_what_a_csv_writer_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, captions: list[str], delimiter: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    rows = [[f"{number}.jpg", caption, "train"] for number, caption in enumerate(captions)]
    (folder / "t.txt").write_bytes(delimited(["image", "caption", "split"], rows, delimiter).encode())
    read = read_annotations(DataSection(root=str(folder), annotations="t.txt"), folder).dataset
    assert read.column("captions") == [as_list(caption) for caption in captions]


@pytest.mark.parametrize("number", [0, 4, 39])
@pytest.mark.parametrize(("end", "other"), [("", 4), (".", 20), ('"', 9)])
def test_a_quote_that_nothing_closes_swallows_no_row(tmp_path: Path, number: int, end: str, other: int) -> None:
    texts = [f"a dog {each}" for each in range(40)]
    texts[number] = f'"{texts[number]}'
    texts[other] += end
    rows = [f"{each},{name},{text}" for each, (name, text) in enumerate(zip(NAMES, texts, strict=True))]
    write_photographs(tmp_path, {"captions.csv": joined("id,image,caption", *rows)})
    if number == other and end == '"':
        texts[number] = texts[number].strip('"')
    assert survey(str(tmp_path)).dataset.column("captions") == [[text] for text in texts]


HEADER = "image,caption\n"
REFUSED: dict[str, tuple[str, bytes | str, str]] = {  # {what: (file name, content, part of the sentence)}
    "UTF-16": (
        "captions.txt",
        (HEADER + "0.jpg,a").encode("utf-16"),
        r"not text in UTF-8 \(byte 0\); save it as UTF-8",
    ),
    "UTF-16 without a mark": ("c.csv", (HEADER + "0.jpg,a").encode("utf-16-le"), "not text in UTF-8.*save it as UTF-8"),
    "UTF-16 lines": ("c.jsonl", '{"image": "0.jpg"}\n'.encode("utf-16"), "not text in UTF-8.*save it as UTF-8"),
    "Latin-1": ("captions.txt", (HEADER + "0.jpg,café").encode("latin-1"), "byte 23.; save it as UTF-8"),
    "repeated": ("c.csv", "image,caption,caption\n0.jpg,a,b\n", "names the column 'caption' twice; rename one of them"),
    "no delimiter": ("c.tsv", "foo\n0.jpg\n", "its first line has no names of columns with commas, tabs"),
    "commas": ("c.csv", "image,caption,split\n0.jpg,a, b,val\n", "line 2 has 4 values.*put texts with commas into"),
    "open quote": ("c.csv", 'image,caption,split\n0.jpg,a,val\n0.jpg,"a, b,val\n', "line 3 has 4.*not closed"),
    "unknown columns": (
        "c.txt.csv",
        "bild,wort\n0.jpg,a, b\n",
        "no text in the column image or file_name; .* bild, wort",
    ),
    "LLaVA": (
        "a.json",
        '[{"id": 1, "image": "0.jpg", "conversations": []}]',
        "has conversations, as LLaVA's .* the columns",
    ),
    "list of texts": ("captions.json", '["a", "b"]', "row 1 is not an object"),
    "results of COCO": ("a.json", '[{"image_id": 3, "caption": "a"}]', "row 1 has no text in the column image"),
    "object": ("captions.json", '{"0.jpg": ["a"]}', "unknown format; expected .*'images'"),
    "broken": ("captions.json", '[{"image": "0.jpg"', "is not valid JSON"),
    "addresses": ("c.tsv", "caption\timage\na\thttps://x.org/0.jpg\n", "on the web .*; download them"),
    "save_to_disk": ("train/data-00000-of-00001.arrow", b"\xff\xff", "save_to_disk of Hugging Face's .*to_parquet"),
    "no annotations": ("package.json", "{}", "package.json has an unknown format"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, what: str) -> None:
    name, content, message = REFUSED[what]
    write_photographs(tmp_path, {name: content, "train/dataset_info.txt": "{}"})
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=message) as error:
            survey(str(place))
        assert str(error.value).isprintable()


def test_a_look_at_many_files_shows_progress_and_has_an_end(
    tmp_path: Path, images: list[Captioned], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FORMS["text"](tmp_path, images)
    monkeypatch.setattr("raycap.pipeline.data.survey.MAX_LISTED", 100)
    monkeypatch.setattr("raycap.pipeline.runtime.log.LINE_EVERY_S", -1)
    assert main(["init", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "listed     1 files\n" in printed.out
    assert printed.err.endswith(" has 100 files or more; name the folder of the images, or an annotation file\n")


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
