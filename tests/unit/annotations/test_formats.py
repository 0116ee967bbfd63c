"""Annotation files of every format give the same data set; malformed files are named in errors."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
import unicodedata
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.config.sections import DataSection
from raycap.pipeline.data import reading
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.formats.files import read_json
from raycap.pipeline.data.formats.splits import id_of_name
from raycap.pipeline.data.images import ImageLocation
from raycap.pipeline.data.language.tokenizers import tokenize_like_spacy
from raycap.pipeline.data.reading import Annotations, build_vocabulary, read_annotations, read_dataset
from raycap.pipeline.data.survey import read_references
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.path import StoragePath
from tests.support.forms import add_file


def test_rows_without_ids_get_those_of_their_names_and_malformed_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    config = DataSection(root=str(tmp_path), annotations="t.jsonl")

    def read(*rows: Any) -> Any:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_annotations(config, tmp_path)

    dataset, problems, _ = read({"image": "1.png", "caption": "one"}, {"image": "./b/../2.png", "captions": [3, ""]})
    assert dataset.column("image_id") == [id_of_name("1.png"), id_of_name("2.png")]
    assert dataset.column("captions") == [["one"], [""]]
    assert dataset.column("uri")[1] == str(tmp_path / "2.png")
    assert len(problems) == 1 and "row 2" in problems[0]
    for rows, message in [
        ([{"id": 1}], "no text in the column image"),
        ([{"image": "1.png", "id": 1.5}], "the id 1.5 is neither a whole number nor text"),
        ([{"image": "1.png", "id": True}], "the id True is neither a whole number nor text"),
        ([{"image": "1.png", "split": False}], "split False is not text"),
        (
            [{"image": "1.png", "split": "val"}, {"image": "./1.png", "split": 0}],
            "has the split 'val' and in this row 0",
        ),
        ([{"image": "1.png", "split": 0}, {"image": "1.png", "split": "val"}], "has the split 0 and in this row 'val'"),
        ([{"image": "../1.png"}], "is outside of"),
        ([{"image": "s3://bucket/private.png"}], "set data.images to the images' prefix"),
        ([[1]], "not an object"),
        ([], "no rows"),
    ]:
        with pytest.raises(UserError, match=message):
            read(*rows)


def table(folder: Path, *rows: dict[str, Any], **keys: Any) -> Dataset:
    """The data set of a table in JSON lines."""
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_annotations(DataSection(root=str(folder), annotations="t.jsonl", **keys), folder).dataset


def test_ids_that_are_no_numbers_have_a_hash_in_the_data_set(tmp_path: Path) -> None:
    """The file's id is kept. The name of an image stands for a missing id. Regions need numbers."""
    rows = [{"image": f"{n}.png", "id": value} for n, value in enumerate(["u0", "17", 18.0, None, ""])]
    dataset = table(tmp_path, *rows)
    hashes = [id_of_name(name) for name in ("0.png", "3.png", "4.png")]
    assert dataset.column("image_id") == [hashes[0], 17, 18, *hashes[1:]]
    assert dataset.source_ids() == ["u0", "17", 18, "3.png", "4.png"]
    dataset.save(tmp_path / "data.arrow")
    assert Dataset.load(tmp_path / "data.arrow").source_ids() == dataset.source_ids()
    with pytest.raises(UserError, match="by the ids of images; the id u0 is no whole number"):
        dataset.keyed_by_id()
    numbers = table(tmp_path, {"image": "a.png", "id": "007"}, {"image": "b.png", "id": -1})
    assert numbers.keyed_by_id().column("key") == ["id-7", "id--1"]
    (tmp_path / "val.txt").write_text("0.png u0\n")
    assert table(tmp_path, *rows, split_lists={"val": "val.txt"}).column("split") == ["val"] + ["train"] * 4


def test_files_that_count_from_0_are_one_data_set(tmp_path: Path) -> None:
    """An id may be in two files, but not twice in a file, in a split, or for one image."""

    def read(*splits: str, name: str = "{split}{number}.jpg") -> Dataset:
        for number, split in enumerate(splits):
            images = [{"id": each, "file_name": name.format(split=split, number=each)} for each in (0, f"i{number}", 7)]
            (tmp_path / f"{number}.json").write_text(json.dumps({"images": images}))
        sources = [{"annotations": f"{number}.json", "split": split} for number, split in enumerate(splits)]
        return read_annotations(DataSection(root=str(tmp_path), sources=sources), tmp_path).dataset

    dataset = read("train", "val")
    assert dataset.source_ids() == [0, "i0", 7, 0, "i1", 7] and len({*dataset.column("image_id")}) == 6
    assert dataset.column("image_id")[3] == id_of_name("1.json 0") and list(dataset.split("val").uris()) == [0, "i1", 7]
    assert read("train").column("image_id")[0] == 0
    with pytest.raises(UserError, match="images of several splits have the id 0; give one --split of train, val"):
        dataset.require_distinct_ids()
    for splits, name in ((("val", "val"), "{split}{number}.jpg"), (("train", "val"), "{number}.jpg")):
        with pytest.raises(UserError, match="repeats the image id 0; name one of the annotation files"):
            read(*splits, name=name)


def test_names_that_stand_for_ids_are_distinct(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / f"pets/{split}").mkdir(parents=True)
        (tmp_path / f"pets/{split}/dog.jpg").touch()
        (tmp_path / f"pets/{split}/dog.txt").write_text(split)
    sources = [{"annotations": f"pets/{split}", "split": split} for split in ("train", "val")]
    for count, names in ((1, ["dog.jpg"]), (2, ["train/dog.jpg", "val/dog.jpg"])):
        section = DataSection(root=str(tmp_path), sources=sources[:count])
        assert read_annotations(section, tmp_path).dataset.source_ids() == names
    assert read_references(tmp_path / "pets").references() == {"train/dog.jpg": ["train"], "val/dog.jpg": ["val"]}
    with pytest.raises(UserError, match="pets/none does not exist"):
        read_references(tmp_path / "pets/none")


@pytest.mark.parametrize("keys", [{}, {"split_fractions": {"train": 0.5, "val": 0.5}}])
def test_a_name_that_is_not_utf8_is_named(tmp_path: Path, keys: dict[str, Any]) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jpg")).write_bytes(b"")
    with pytest.raises(UserError, match="is not text in UTF-8; rename the file") as caught:
        read_annotations(DataSection(root=str(tmp_path), annotations=".", **keys), tmp_path)
    assert str(caught.value).isprintable()


def coco(tmp_path: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]], **config: Any) -> Any:
    (tmp_path / "captions_val2014.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    section = DataSection(root=str(tmp_path), annotations="captions_val2014.json", **config)
    return read_annotations(section, tmp_path).dataset


def test_nocaps_domains_are_splits(tmp_path: Path) -> None:
    images = [{"id": n, "file_name": f"{n}.jpg", "domain": d} for n, d in enumerate(("in-domain", "out-domain"))]
    annotations = [{"image_id": 1, "caption": "b"}, {"image_id": 0, "caption": "a"}, {"image_id": 1, "caption": "c"}]
    dataset = coco(tmp_path, images, annotations, format="nocaps")
    assert dataset.column("split") == ["in-domain", "out-domain"]
    assert dataset.column("captions") == [["a"], ["b", "c"]]


def test_images_of_cocos_test_server_have_no_captions(tmp_path: Path) -> None:
    """image_info_test2014.json, whose 40,775 images are captioned for the server."""
    images = [{"id": number, "file_name": f"COCO_test2014_{number:012d}.jpg", "width": 640} for number in (7, 9)]
    (tmp_path / "image_info_test2014.json").write_text(json.dumps({"info": {}, "images": images, "licenses": []}))
    for format_ in ("auto", "coco"):
        section = DataSection(root=str(tmp_path), annotations="image_info_test2014.json", format=format_)
        dataset, problems, _ = read_annotations(section, tmp_path)
        assert dataset.column("image_id") == [7, 9] and dataset.column("split") == ["test", "test"]
        assert dataset.column("captions") == [[], []] and not problems
    (tmp_path / "image_info_test2014.json").write_text(json.dumps({"images": images, "annotations": {}}))
    with pytest.raises(UserError, match="with the list 'annotations' if the images have captions"):
        read_annotations(section, tmp_path)


def test_coco_files_with_split_lists_equal_karpathys_file(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "coco_captions"
    lists = {split: f"karpathy_{split}_images.txt.gz" for split in ("val", "test")}
    for name in ("captions_val2014.json.gz", "dataset_coco_val2014_karpathy.json.gz", *lists.values()):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "val2014").mkdir()
    source = {"annotations": "captions_val2014.json.gz", "images": "val2014", "split": "restval"}
    coco_files = DataSection(root=str(tmp_path), sources=[source], split_lists=lists)
    karpathy = DataSection(root=str(tmp_path), annotations="dataset_coco_val2014_karpathy.json.gz")
    first, problems, _ = read_annotations(coco_files, tmp_path)
    second = read_annotations(karpathy, tmp_path).dataset
    assert not problems and len(first) == 40504 and len(first.split("test")) == len(first.split("val")) == 5000

    def rows(dataset: Any) -> dict[int, Any]:
        columns = (dataset.column(name) for name in ("image_id", "split", "uri", "captions"))
        return {row[0]: (row[1], Path(row[2]).name, sorted(row[3])) for row in zip(*columns, strict=True)}

    assert rows(first) == rows(second)


def test_one_json_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Content(dict[str, Any]):
        """A dictionary to which there can be weak references."""

    contents: list[weakref.ref[Content]] = []

    def read(path: StoragePath) -> Content:
        assert not any(each() for each in contents)
        content = Content(read_json(path))
        contents.append(weakref.ref(content))
        return content

    monkeypatch.setattr(reading, "read_json", read)
    for number in range(3):
        images = [{"id": number, "file_name": f"{number}.jpg"}]
        (tmp_path / f"{number}.json").write_text(json.dumps({"images": images}))
    read_annotations(DataSection(root=str(tmp_path), annotations="*.json"), tmp_path)
    assert len(contents) == 3


def test_tokens_of_ten_thousand_captions_are_spacys(shared: Path) -> None:
    """The digest is of spaCy 3.8.7's `English().tokenizer`, without white space and the marks that we drop."""
    path = shared / "data" / "coco_captions" / "dataset_coco_val2014_karpathy.json.gz"
    images = json.loads(gzip.decompress(path.read_bytes()))["images"]
    captions = [sentence["raw"] for image in images for sentence in image["sentences"]][35_862:45_862]
    tokens = list(map(tokenize_like_spacy, captions))
    counts = Counter(word for words in tokens for word in words)
    assert (len(counts), sum(count >= 5 for count in counts.values())) == (4_696, 1_455)
    digest = hashlib.sha256("".join(" ".join(words) + "\n" for words in tokens).encode()).hexdigest()
    assert digest == "c1b3d1bb9de243e0908b643f31718e0fd94367ea8b242d50a8d0b49c672e25c8"


def test_vocabulary_follows_the_configured_tokenizer_and_splits(tmp_path: Path) -> None:
    rows = [
        {"image": "1.png", "captions": ["man's man's dog"], "split": "train"},
        {"image": "2.png", "captions": ["dog cat cat"], "split": "val"},
        {"image": "3.png", "captions": ["x"], "split": "test"},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = DataSection(root=str(tmp_path), annotations="t.jsonl", min_count=2)
    dataset = read_dataset(base, tmp_path)
    assert set(build_vocabulary(dataset, base).words) == {"man", "s", "PAD", "SOS", "EOS", "UNK"}
    wide = base.model_copy(update={"tokenizer": "spacy", "vocabulary_splits": ("train", "val")})
    vocabulary = build_vocabulary(dataset, wide)
    assert set(vocabulary.words) == {"man", "'s", "dog", "cat", "PAD", "SOS", "EOS", "UNK"}
    vocabulary.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json").tokenize("man's") == ["man", "'s"]


Files = dict[str, bytes | str]  # {name: content, or a link's target if the name begins with ->}


def write_files(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name.removeprefix("->")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("->"):
            path.symlink_to(content)  # type: ignore[arg-type]
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def pack(path: Path, files: Files) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            add_file(archive, name, content.encode() if isinstance(content, str) else content)


def images_of(found: Annotations) -> dict[str, list[str]]:
    """{the file's name without its ending: captions}."""
    names = [ImageLocation.parse(uri).name or uri for uri in found.dataset.column("uri")]
    return {Path(name).stem: captions for name, captions in zip(names, found.dataset.column("captions"), strict=True)}


@pytest.mark.parametrize(
    ("files", "images", "left_out"),
    [
        ({"a.b.jpg": "", "a.b.txt": "x", "a.c.jpg": "", "a.c.txt": "y"}, {"a.b": ["x"], "a.c": ["y"]}, []),
        ({"v1.0/a.jpg": "", "v1.0/a.txt": "x"}, {"a": ["x"]}, []),
        ({"2024.01.31 a.JPG": "", "2024.01.31 a.TXT": "x"}, {"2024.01.31 a": ["x"]}, []),
        ({"a.b.json": '{"text": "x"}', "a.b.webp": ""}, {"a.b": ["x"]}, []),
        ({"a.txt": "x", "a.rgb.jpg": "", "a.boxes.json": "[1]"}, {"a.rgb": ["x"]}, []),
        (
            {"a.jpg": "", "a.txt": "x", "a.seg.png": "", "a.en.txt": "y", "a.boxes.json": "[1]"},
            {"a": ["x"]},
            [
                "1 images beside another image of their sample are",
                "1 texts beside no image are not used, first a.tar/a.en",
            ],
        ),
        ({"a.jpg": "", "a.txt": "x", "a.b.jpg": "", "a.b.txt": "y"}, {"a": ["x"], "a.b": ["y"]}, []),
        ({"a.jfif": "", "a.txt": "x", "b.pjpeg": "", "b.txt": "y"}, {"a": ["x"], "b": ["y"]}, []),
        (
            {"a.jpg": "", "a.txt": "x", "b.heic": "", "b.txt": "y", "._a.jpg": "", ".x/a.jpg": "", "README.md": ""},
            {"a": ["x"]},
            [
                "1 images in formats that are not read are not used, first a.tar/b.heic",
                "2 hidden images are not used, first a.tar/._a.jpg",
                "1 texts beside no image are not used, first a.tar/b",
            ],
        ),
        (
            {
                "a.jpg": "",
                "a.txt": "x",
                "a.json": '{"caption": "y"}',
                "b.jpg": "",
                "b.txt": "z",
                "b.json": '{"text": "z"}',
            },
            {"a": ["x"], "b": ["z"]},
            ["1 captions in JSON beside a text with other captions are not used, first a.tar/a.jpg"],
        ),
    ],
)
def test_what_an_archive_has_is_used_or_counted(
    tmp_path: Path, files: Files, images: dict[str, list[str]], left_out: list[str]
) -> None:
    pack(tmp_path / "a.tar", files)
    found = read_annotations(DataSection(root=str(tmp_path), annotations="a.tar"), tmp_path)
    assert images_of(found) == images and not found.problems and len(found.left_out) == len(left_out)
    assert all(map(str.startswith, found.left_out, left_out))


@pytest.mark.parametrize(
    ("files", "images", "left_out"),
    [
        ({"a.jfif": "", "a.txt": "x", "B.JPE": "", "B.TXT": "y"}, {"a": ["x"], "B": ["y"]}, []),
        (
            {"a.jpg": "", "a.txt": "x", "README.txt": "r", "LICENSE": "", ".git/HEAD": "", "val.txt": "a"},
            {"a": ["x"]},
            [],
        ),
        (
            {"a.jpg": "", "a.txt": "x", "b.txt": "y"},
            {"a": ["x"]},
            ["1 texts beside no image are not used, first b.txt"],
        ),
        (
            {"a.jpg": "", "a.txt": "x", "b": "", "b.txt": "y"},
            {"a": ["x"]},
            ["1 texts beside no image are not used, first b"],
        ),
        (
            {"a.jpg": "", "a.txt": "x", "._a.jpg": "", ".ipynb_checkpoints/a.jpg": "", "__MACOSX/._a.jpg": ""},
            {"a": ["x"]},
            ["3 hidden images are not used, first ._a.jpg"],
        ),
        (
            {"a.jpg": "", "a.txt": "x", "b.heic": "", "c.SVG": ""},
            {"a": ["x"]},
            ["2 images in formats that are not read are not used, first b.heic"],
        ),
        ({"->test": "../out", "a.jpg": "", "a.txt": "x"}, {"a": ["x"], "o": ["out"]}, []),
        (
            {"->t": ".", "a.jpg": "", "a.txt": "x"},
            {"a": ["x"]},
            ["1 links to folders that are read under another name"],
        ),
        ({"a.jpg": "", "->a.txt": "b/README.txt", "b/README.txt": "x"}, {"a": ["x"]}, []),
        ({"->a.jpg": "../out/o.jpg", "a.txt": "x"}, {"a": ["x"]}, []),
        (
            {"a.jpg": "", "->a.txt": "../out/o.txt"},
            {"a": []},
            ["1 texts that are links out of the folder or to nothing"],
        ),
        ({"a.jpg": "", "->a.txt": "none"}, {"a": []}, ["1 texts that are links out of the folder or to nothing"]),
    ],
)
def test_what_a_folder_has_is_used_or_counted(
    tmp_path: Path, files: Files, images: dict[str, list[str]], left_out: list[str]
) -> None:
    write_files(tmp_path, {"out/o.jpg": "", "out/o.txt": "out", "set/x/y": ""})
    write_files(tmp_path / "set", files)
    found = read_annotations(DataSection(root=str(tmp_path / "set"), annotations="."), tmp_path / "set")
    assert images_of(found) == images and len(found.left_out) == len(left_out)
    assert all(map(str.startswith, found.left_out, left_out))


NFC, NFD = (unicodedata.normalize(form, "caf\u00e9.png") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("image", "line"),
    [
        ("a.png", "\ufeffa.png"),
        ("a.png", "  a.png \r"),
        ("a.png", "a.png\t17"),
        ("my dog.png", "my dog.png"),
        ("my dog.png", "my dog.png 17"),
        ("x/a.png", "a.png"),
        ("y/x/a.png", "x\\a.png"),
        ("a.png", "x/a.png"),
        (NFC, NFD),
        (NFD, NFC),
    ],
)
def test_names_in_split_lists_are_those_of_images(tmp_path: Path, image: str, line: str) -> None:
    (tmp_path / "val.txt").write_bytes(f"{line}\nunknown.png\n".encode())
    (tmp_path / "train.txt").write_text("1.png\n")
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"image": name, "text": "a"}) + "\n" for name in (image, "1.png", "2.png"))
    )
    lists = {"val": "val.txt", "Train": "train.txt"}
    found = read_annotations(DataSection(root=str(tmp_path), annotations="t.jsonl", split_lists=lists), tmp_path)
    assert found.dataset.column("split") == ["val", "train", "train"]
    assert found.left_out == [
        "1 images in no list of data.split_lists are in the split train, first 2.png",
        "1 names in data.split_lists, which no image has, are not used, first unknown.png",
    ]


def test_names_that_windows_and_macos_wrote_are_those_on_the_disk(tmp_path: Path) -> None:
    write_files(tmp_path, {f"x/{NFD}": "", f"{NFC}": "", "x/b.png": "", "x\\c.png": ""})
    names = ["x\\b.png", f"x/{NFC}", NFD, "x\\c.png", "missing\\d.png", f"x\\{NFC}", "s\u00e9.png"]
    dataset = table(tmp_path, *({"image": name, "text": "a"} for name in names))
    found = [uri.removeprefix(f"{tmp_path}/") for uri in dataset.column("uri")]
    assert found == ["x/b.png", f"x/{NFD}", NFC, "x\\c.png", "missing\\d.png", "s\u00e9.png"]
    for name in ("..\\secret.png", "\u00e9/../../secret.png"):
        (tmp_path.parent / "secret.png").touch()
        with pytest.raises(UserError, match="is outside of"):
            table(tmp_path, {"image": name, "text": "a"})


def test_splits_have_the_same_name_in_any_case_and_with_blanks(tmp_path: Path) -> None:
    stated = [" Train ", "TRAIN", "VAL", "val", "Validation", "In-Domain ", " ", None]
    dataset = table(tmp_path, *({"image": f"{n}.png", "text": "a", "split": split} for n, split in enumerate(stated)))
    assert dataset.column("split") == ["train", "train", "val", "val", "validation", "In-Domain", "train", "train"]
    config = DataSection(root=str(tmp_path), val_split=" VAL", train_splits=["Train"], test_splits=["In-Domain"])
    assert (config.val_split, config.train_splits, config.test_splits) == ("val", ("train",), ("In-Domain",))


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        ("train", "train"), ("val2014", "val"), ("Validation", "val"), ("TEST_1", "test"), ("deep/dev/x", "val"),
        ("testing", "test"), ("valley", "train"), ("test_photos", "test"), ("eval", "val"), ("tests", "train"),
    ],
)  # fmt: skip
def test_folders_give_splits_if_the_configuration_says_so(tmp_path: Path, folder: str, split: str) -> None:
    row = {"image": f"{folder}/1.png", "text": "a"}
    assert table(tmp_path, row).column("split") == ["train"]
    assert table(tmp_path, row, split_by_folder=True).column("split") == [split]
    assert table(tmp_path, row | {"split": "mine"}, split_by_folder=True).column("split") == ["mine"]
    fractions = {"split_fractions": {"x": 1.0}, "split_by_folder": True}
    assert table(tmp_path, row, **fractions).column("split") == ["x" if split == "train" else split]
