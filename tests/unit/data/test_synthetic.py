"""The synthetic data set: captions match their pictures, splits are disjoint, files have Karpathy's layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.language.tokenizers import tokenize
from raycap.pipeline.data.synthetic import scenes as synthetic
from raycap.pipeline.data.synthetic.scenes import NOVEL, make_scene, write_dataset

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
