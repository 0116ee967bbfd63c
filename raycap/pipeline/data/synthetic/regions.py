"""Regions of the synthetic data set: simulated detector features of each shape and of the whole picture.

A region is the box of a shape or of the whole picture. Its features start with one number for each color, shape and
background: 1 when the region has it and 0 otherwise, plus noise. The box's position and size follow, as in bottom-up
features. Boxes are corners x0 y0 x1 y1 in pixels. A detector sorts regions by its confidence; these are sorted by size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.synthetic.scenes import BACKGROUNDS, COLORS, SHAPES, Scene, SceneObject, make_scene

NOISE = 0.2  # standard deviation; about one shape in 1,000 has a larger feature for a wrong color than for its own
JITTER = 0.01  # standard deviation of a box's corners, as a share of the picture
WIDTH = len(COLORS) + len(SHAPES) + len(BACKGROUNDS) + 6  # the last 6 are x0 y0 x1 y1, width, height as shares


def file_name(config: SceneConfig) -> str:
    """A name with a hash of everything that determines the file's content."""
    scenes = {key: value for key, value in asdict(config).items() if key != "language"}  # regions have no words
    settings = json.dumps([scenes, NOISE, JITTER, WIDTH], sort_keys=True)
    return f"synthetic-regions-{hashlib.sha256(settings.encode()).hexdigest()[:10]}.hdf5"


def scene_regions(config: SceneConfig) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(image id, features (R, WIDTH), boxes (R, 4)) of every scene, float32, with the ids of `write_dataset`."""
    for index in range(config.num_images):
        scene, _ = make_scene(config.seed, index)
        yield index + 1, *regions_of(scene, np.random.default_rng([config.seed, index]), config.image_size)


def regions_of(scene: Scene, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (R, WIDTH) and boxes (R, 4) of one scene."""
    shapes = [shape for shape in (scene.main, scene.second) if shape is not None]
    boxes = [
        (item.x - item.extent, item.y - item.extent, item.x + item.extent, item.y + item.extent) for item in shapes
    ]
    corners = np.array([(0.0, 0.0, 1.0, 1.0), *boxes])  # as shares of the picture
    corners[1:] += rng.normal(0, JITTER, corners[1:].shape)
    corners = corners.clip(0, 1)
    evidence = np.stack([_evidence(scene.background, shape) for shape in (None, *shapes)])
    evidence += rng.normal(0, NOISE, evidence.shape)
    sides = corners[:, 2:] - corners[:, :2]
    order = np.argsort(-sides.prod(1), kind="stable")
    features = np.concatenate((evidence, corners, sides), 1)[order]
    return features.astype(np.float32), (corners[order] * image_size).astype(np.float32)


def _evidence(background: str, shape: SceneObject | None) -> np.ndarray:
    """Features of a region without noise, position and size; `shape` is None for the region of the whole picture."""
    attributes = (background,) if shape is None else (shape.color, shape.shape)
    return np.array([float(name in attributes) for name in (*COLORS, *SHAPES, *BACKGROUNDS)])
