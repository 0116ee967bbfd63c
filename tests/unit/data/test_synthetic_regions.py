"""Regions of the synthetic data set: boxes around the shapes, evidence that is mostly right."""

from __future__ import annotations

import numpy as np

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.synthetic import scenes as synthetic
from raycap.pipeline.data.synthetic.scenes import (
    BACKGROUNDS,
    COLORS,
    REGION_WIDTH,
    SHAPES,
    draw_scene,
    make_scene,
    scene_regions,
)

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
