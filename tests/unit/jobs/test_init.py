"""`raycap init` recognizes every form, writes a configuration that `raycap check` accepts, and names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycap.jobs.cli import main
from raycap.pipeline.config.load import load_config
from raycap.pipeline.data.reading import find_data
from tests.support.forms import FORMS, Captioned, scenes, write_images, write_tars


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Captioned]:
    """60 scenes in the splits that most data sets have."""
    found = scenes(tmp_path_factory.mktemp("scenes") / "set")
    return [image._replace(split=image.split.replace("novel", "test")) for image in found]


def init(*words: str | Path) -> int:
    return main(["init", *map(str, words)])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognized(
    tmp_path: Path, images: list[Captioned], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = tmp_path / "my set", tmp_path / "set.yaml"
    FORMS[form](folder, images)
    if form == "metadata.jsonl":  # with names of columns that init cannot know
        lines = (folder / "metadata.jsonl").read_text()
        (folder / "metadata.jsonl").write_text(lines.replace('"number"', '"id"').replace('"part"', '"split"'))
    assert init(folder, "--out", config, "--no-pretrained") == 0
    assert [stage.patience for stage in load_config(config).stages] == [8, 8]
    printed = capsys.readouterr().out
    assert "images    60: train 48, test 8, val 4" in printed and "captions  300, 5 per image" in printed
    assert "language  en (Latin), tokenizer expansionnet" in printed
    assert printed.endswith(f"next      raycap check {config}\n          raycap run {config}\n")
    read = load_config(config, [f"storage={tmp_path / 'results'}"])
    assert "language:" not in config.read_text()  # English is the default
    dataset, unreadable = find_data(read)
    assert len(dataset) == 60 and not unreadable and read.name == "my-set"
    assert sorted(dataset.column("captions")) == sorted(image.captions for image in images)
    assert main(["check", str(config), "--set", f"storage={tmp_path / 'results'}"]) == 0
    assert "fit to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "caption", "tokenizer"),
    [
        ("zh", "一只狗在草地上奔跑", "characters"),
        ("hi", "एक कुत्ता घास पर दौड़ रहा है", "unicode"),
        ("de", "Ein Hund läuft mit einem Ball auf der Wiese", "unicode"),
    ],
)
def test_the_language_is_written(
    tmp_path: Path, images: list[Captioned], code: str, caption: str, tokenizer: str
) -> None:
    FORMS["table"](tmp_path / "set", [image._replace(captions=[caption]) for image in images])
    assert init(tmp_path / "set", "--out", tmp_path / "x.yaml", "--no-pretrained") == 0
    data = load_config(tmp_path / "x.yaml").data
    assert (data.language, data.tokenizer) == (code, tokenizer)


def test_a_file_is_not_replaced_without_force(
    tmp_path: Path, images: list[Captioned], capsys: pytest.CaptureFixture[str]
) -> None:
    write_tars(tmp_path / "shards", images)
    out = tmp_path / "x.yaml"
    out.write_text("mine")
    assert init(tmp_path / "shards", "--out", out) == 2
    assert "exists; give another name, or --force to replace it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert init(tmp_path / "shards", "--out", out, "--force") == 0
    assert "weights: pretrained" in out.read_text() and load_config(out).backbone.weights == "pretrained"
    assert [stage.name for stage in load_config(out).stages] == ["xe_frozen"]


@pytest.mark.parametrize(
    "name", ["2017", "2024-01-31", "no", "null", "yes", "1e3", "0x1f", "true", "1_000", "12:30:45", "- a: b"]
)
def test_names_stay_text(tmp_path: Path, images: list[Captioned], name: str) -> None:
    write_images(tmp_path / name / name, images)
    rows = [{"img": image.name, "description": image.captions[0]} for image in images]
    (tmp_path / name / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init(tmp_path / name, "--out", tmp_path / "x.yaml", "--no-pretrained") == 0
    config = load_config(tmp_path / "x.yaml")
    assert (config.data.images, config.data.annotations) == (name, f"{name}.jsonl")
    assert config.name == (name if name.isalnum() else config.name)


@pytest.mark.parametrize("count", [20, 30, 40])
def test_few_images_are_divided_so_that_check_accepts_them(
    tmp_path: Path, images: list[Captioned], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tenth of the images for validation, some numbers would leave one image, and CIDEr-D needs two."""
    write_images(tmp_path / "set", images[:count])
    rows = [{"image": image.name, "caption": caption} for image in images[:count] for caption in image.captions]
    (tmp_path / "set/all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init(tmp_path / "set", "--out", tmp_path / "x.yaml", "--no-pretrained") == 0
    assert main(["check", str(tmp_path / "x.yaml"), "--set", f"storage={tmp_path / 'results'}"]) == 0
    assert "fit to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has 0 images and no captions"),
        ({"a.jpg": b"x", "b/c.png": b"x"}, "has 2 images and no captions; add an annotation file"),
        ({"part.parquet": b"x" * 600}, "is not a readable Parquet file"),
        ({"a.csv": b"image,caption\nx.jpg,a cat\n"}, "names images such as x.jpg, which are not below"),
        ({"a.csv": b"image,caption\nx.jpg,\n", "x.jpg": b"x"}, "x.jpg; add some, or set data.columns.captions"),
        ({"a.csv": b"image,caption\nx.jpg,a cat\n", "x.jpg": b"x"}, "are too few to divide"),
    ],
)
def test_what_is_no_data_set_is_named(
    tmp_path: Path, files: dict[str, bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    for name, content in files.items():
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_bytes(content)
    assert init(tmp_path / "set", "--out", tmp_path / "x.yaml") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "x.yaml").exists()


def test_photographs_of_flickr8k(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared / "data" / "flickr8k_subset"
    if not folder.is_dir():
        pytest.skip("no flickr8k_subset")
    assert init(folder, "--out", tmp_path / "x.yaml", "--no-pretrained") == 0
    print(text := capsys.readouterr().out)
    assert "language  en (Latin)" in text
    assert main(["check", str(tmp_path / "x.yaml"), "--set", f"storage={tmp_path / 'results'}"]) == 0
