"""The synthetic data set: its captions and regions match its pictures, and files have Karpathy's layout."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.language.tokenizers import TOKENIZERS, tokenize
from raycap.pipeline.data.synthetic import scenes as synthetic
from raycap.pipeline.data.synthetic.scene_captions import GRAMMARS, main_object
from raycap.pipeline.data.synthetic.scenes import (
    BACKGROUNDS,
    COLORS,
    NOVEL,
    REGION_WIDTH,
    SHAPES,
    draw_scene,
    make_scene,
    scene_regions,
    write_dataset,
)

SCENES = [make_scene(0, index) for index in range(1500)]
SIDES = {
    "left": ("left of", "to its right", "on the right"),
    "right": ("right of", "to its left", "on the left"),
    "above": (" above a", " over a", "below it", "under it"),
    "below": (" below a", " under a", "above it", "over it"),
    "behind": (" behind a", " around a", "inside"),
}


def _digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _where(pixels: np.ndarray, color: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels of one object, by its color."""
    rows, columns = np.nonzero(np.abs(pixels.astype(int) - synthetic.COLORS[color]).sum(2) < 40)
    return rows, columns


def test_splits_have_the_promised_sizes() -> None:
    splits = [scene.split for scene, _ in SCENES]
    assert {split: splits.count(split) for split in splits} == {"train": 1200, "val": 100, "test": 150, "novel": 50}


def test_novel_combinations_are_shown_in_no_other_split() -> None:
    for scene, _ in SCENES:
        objects = [scene.main, *([scene.second] if scene.second else [])]
        shown = {(item.color, item.shape) for item in objects}
        if scene.split == "novel":
            assert (scene.main.color, scene.main.shape) in NOVEL
        else:
            assert not shown & set(NOVEL)
    train = [scene.main for scene, _ in SCENES if scene.split == "train"]
    assert {item.color for item in train} == set(synthetic.COLORS)
    assert {item.shape for item in train} == set(synthetic.SHAPES)


def test_relation_words_match_the_pictures() -> None:
    """Relations measured in the pixels, from the middles of the two colors' boxes."""
    checked = 0
    for scene, captions in SCENES[:400]:
        if scene.second is None:
            continue
        pixels = np.asarray(synthetic.draw_scene(scene, 64))
        (rows, columns), (rows2, columns2) = _where(pixels, scene.main.color), _where(pixels, scene.second.color)
        assert rows.size and rows2.size
        across, down = (
            np.ptp(b) / 2 + b.min() - np.ptp(a) / 2 - a.min() for a, b in ((columns, columns2), (rows, rows2))
        )
        if abs(across) < 3 and abs(down) < 3:
            side = "behind"
        elif abs(across) > abs(down):
            side = "left" if across > 0 else "right"
        else:
            side = "above" if down > 0 else "below"
        for caption in captions:
            named = {name for name, words in SIDES.items() if any(word in caption for word in words)}
            assert named in ({side}, set()), (caption, side)
            checked += bool(named)
    assert checked > 1000


def test_folder_is_deterministic_and_in_karpathy_layout(tmp_path: Path) -> None:
    config = SceneConfig(num_images=30, image_size=48, seed=3)
    write_dataset(tmp_path / "a", config)
    write_dataset(tmp_path / "deeper" / "b", config)
    write_dataset(tmp_path / "other", SceneConfig(num_images=30, image_size=48, seed=4))
    assert _digest(tmp_path / "a") == _digest(tmp_path / "deeper" / "b")
    assert _digest(tmp_path / "a")["images/scene_000000.png"] != _digest(tmp_path / "other")["images/scene_000000.png"]

    data = json.loads((tmp_path / "a" / "dataset.json").read_text("utf-8"))
    assert data["dataset"] == "raycap-scenes" and len(data["images"]) == 30
    assert {image["split"] for image in data["images"]} == {"train", "val", "test", "novel"}
    assert len({image["cocoid"] for image in data["images"]}) == 30
    sentids = [sentid for image in data["images"] for sentid in image["sentids"]]
    assert sentids == list(range(150))
    for image in data["images"]:
        with Image.open(tmp_path / "a" / image["filepath"] / image["filename"]) as picture:
            assert picture.format == "PNG" and picture.mode == "RGB" and picture.size == (48, 48)
        assert [sentence["sentid"] for sentence in image["sentences"]] == image["sentids"]
        for sentence in image["sentences"]:
            assert sentence["imgid"] == image["imgid"] and sentence["tokens"] == tokenize(sentence["raw"])


@pytest.mark.parametrize("foreign", ["other configuration", "other files", "file"])
def test_foreign_content_is_never_overwritten(tmp_path: Path, foreign: str) -> None:
    folder = tmp_path / "scenes"
    if foreign == "other configuration":
        write_dataset(folder, SceneConfig(num_images=30, image_size=32, seed=1))
    elif foreign == "other files":
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    else:
        folder.write_text("mine")
    before = _digest(tmp_path)
    with pytest.raises(ValueError, match="scenes"):
        write_dataset(folder, SceneConfig(num_images=30, image_size=32))
    assert _digest(tmp_path) == before


@pytest.mark.parametrize("language", GRAMMARS)
def test_all_languages_name_the_main_object(language: str) -> None:
    for index in range(300):
        scene, captions = make_scene(0, index, language)
        assert scene == make_scene(0, index)[0]
        assert len(set(captions)) == 5
        assert {main_object(each, language) for each in captions} == {(scene.main.color, scene.main.shape)}
        assert all("{" not in each and "  " not in each and unicodedata.is_normalized("NFC", each) for each in captions)


def test_english_captions_are_as_before(tmp_path: Path) -> None:
    """The digests are of the data set before there were other languages."""
    write_dataset(tmp_path / "set", SceneConfig(num_images=30, image_size=32))
    content = (tmp_path / "set" / "dataset.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "490f46c31c1f63c902ba08aba79d2d4fa397d811ee9a681f5c29ddf49e1bf666"


def test_the_chinese_grammar() -> None:
    """The characters of 300 scenes; nouns have their measure word."""
    captions = [caption for index in range(300) for caption in make_scene(0, index, "zh")[1]]
    text = "\n".join(captions)
    assert not [each for each in ("个星星", "个大的红色星星", "颗圆形", "颗大的红色圆形", "张圆形") if each in text]
    assert all(each in text for each in ("一颗大的", "一个大的", "一颗红色星星", "一张白色图片"))
    assert 30 < len({word for caption in captions for word in TOKENIZERS["characters"].split(caption)}) < 120


CONFIG = SceneConfig(num_images=300, image_size=64, seed=0)
REGIONS = {image_id: (features, boxes) for image_id, features, boxes in scene_regions(CONFIG)}


def test_one_region_per_shape_and_one_for_the_picture() -> None:
    assert list(REGIONS) == list(range(1, 301))
    for image_id, (features, boxes) in REGIONS.items():
        scene, _ = make_scene(CONFIG.seed, image_id - 1)
        count = 2 if scene.second is None else 3
        assert features.shape == (count, REGION_WIDTH) and boxes.shape == (count, 4) and count <= 3
        assert features.dtype == boxes.dtype == np.float32
        assert boxes[0].tolist() == [0, 0, 64, 64], "the picture is the largest"
        assert (boxes[:, :2] <= boxes[:, 2:]).all() and boxes.min() >= 0 and boxes.max() <= 64


def test_boxes_enclose_the_shapes() -> None:
    """Shapes are located in the pixels, not taken from the scene."""
    for image_id in range(1, 60):
        scene, _ = make_scene(CONFIG.seed, image_id - 1)
        pixels = np.asarray(draw_scene(scene, 64)).astype(int)
        features, boxes = REGIONS[image_id]
        rows, columns = np.nonzero(np.abs(pixels - synthetic.COLORS[scene.main.color]).sum(2) < 40)
        drawn = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert min(np.abs(box - drawn).max() for box in boxes[1:]) < 6, image_id
        assert np.allclose(features[:, -6:-2] * 64, boxes, atol=1e-3), "place and size as the boxes say"


def test_the_evidence_is_mostly_right() -> None:
    right = []
    colors, shapes, backgrounds = list(COLORS), list(SHAPES), list(BACKGROUNDS)
    for image_id, (features, _) in REGIONS.items():
        scene, _ = make_scene(CONFIG.seed, image_id - 1)
        best = set()
        for row in features[1:]:
            color, shape = row[: len(colors)].argmax(), row[len(colors) : len(colors) + len(shapes)].argmax()
            best.add((colors[color], shapes[shape]))
        drawn = {(each.color, each.shape) for each in (scene.main, scene.second) if each is not None}
        place = len(colors) + len(shapes)
        background = backgrounds[features[0, place : place + len(backgrounds)].argmax()]
        right.append(best == drawn and background == scene.background)
    assert 0.95 < np.mean(right) <= 1
