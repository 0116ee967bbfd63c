"""The synthetic data set: pictures of one or two colored shapes with captions, in Karpathy layout like COCO.

The main object is the larger one, and every caption names it first. If sizes were equal, "a circle left of a square"
and "a square right of a circle" would both be correct. Image i depends only on the seed and i, so that a smaller data
set is the beginning of a larger one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from raycap.models.config import Values
from raycap.pipeline.config.languages import suggested_tokenizer
from raycap.pipeline.config.sections import SPLIT_CYCLE, SceneConfig
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.synthetic.scene_captions import CAPTIONS_PER_IMAGE, main_object, scene_captions
from raycap.pipeline.errors import UserError
from raycap.pipeline.storage.atomic import atomic_folder

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 30, 38),
    "orange": (250, 130, 12),
    "yellow": (240, 208, 20),
    "green": (34, 150, 62),
    "blue": (36, 80, 214),
    "purple": (138, 44, 170),
    "black": (24, 24, 28),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
# The main objects of the split "novel". Other splits never combine these colors and shapes, but show each by itself.
NOVEL = (("red", "star"), ("yellow", "circle"), ("green", "cross"), ("blue", "triangle"), ("purple", "square"))
# No background is in COLORS, so that the first color in a caption is that of the main object, in every language.
BACKGROUNDS = {"white": (252, 252, 250), "gray": (208, 210, 214), "pink": (252, 218, 224), "cream": (246, 236, 204)}

# Half the width of an object, as a fraction of the image. The gaps between the sizes make clear which object is larger.
EXTENTS = {"large": (0.26, 0.285), "medium": (0.155, 0.17), "small": (0.09, 0.105)}
SIZE_PAIRS = (("large", "medium"), ("large", "small"))

RELATIONS = ("left", "right", "above", "below", "behind")
# Unit vectors (x, y); y points downwards. DIRECTIONS lead from the second object to the main object.
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
POSITIONS = {
    "in the middle": (0, 0),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
}

# Fractions of the image: where objects may start (left or top), where they must end, and the length between. LENGTH is
# not written as END - START, because its rounding error would change the pictures.
START, END, LENGTH = 0.03, 0.97, 0.94
MAX_SLANT = 0.4  # largest distance of two centers across the relation's axis, divided by that along it
SINGLE_SHARE = 0.25  # fraction of pictures with only one shape
SUPERSAMPLING = 4  # pictures are drawn at this many times their size, then reduced, for smooth edges
# Raise this number when pictures or captions change. The marker file contains it, so that older folders are refused.
FORMAT_VERSION = 1
MARKER = "COMPLETE"
REGION_NOISE = 0.2  # standard deviation, at which one shape in 1,000 has a larger feature for a wrong color
REGION_JITTER = 0.01  # standard deviation of a box's corners, as a fraction of the picture
REGION_WIDTH = len(COLORS) + len(SHAPES) + len(BACKGROUNDS) + 6  # the last 6: x0 y0 x1 y1, width and height


@dataclass(frozen=True)
class SceneObject:
    """One shape. x, y (center) and extent (half width): fractions of the image. angle: in degrees."""

    color: str
    shape: str
    size: str
    x: float
    y: float
    extent: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """The content of a picture."""

    split: str
    background: str
    main: SceneObject
    second: SceneObject | None
    relation: str | None  # where the main object is, relative to the second object
    position: str | None  # where the main object is, if there is no second object


def make_scene(seed: int, index: int, language: str = "en") -> tuple[Scene, list[str]]:
    """The scene of the image with this index, and its five captions, which all name the main object first.

    The scene does not depend on the language of the captions.
    """
    rng = random.Random(f"{seed}/{index}")
    split = SPLIT_CYCLE[index % len(SPLIT_CYCLE)]
    background = rng.choice(list(BACKGROUNDS))
    familiar = [pair for pair in itertools.product(COLORS, SHAPES) if pair not in NOVEL]
    main = rng.choice(NOVEL if split == "novel" else familiar)
    if rng.random() < SINGLE_SHARE:
        scene = _single(rng, split, background, main)
    else:
        second = rng.choice([pair for pair in familiar if pair[0] != main[0]])  # not the main object's color
        scene = _pair(rng, split, background, main, second)
    return scene, scene_captions(rng, scene, language)


def _single(rng: random.Random, split: str, background: str, main: tuple[str, str]) -> Scene:
    """A scene with one object. main: its color and shape."""
    size = rng.choice(("large", "medium"))
    extent = rng.uniform(*EXTENTS[size])
    position, (dx, dy) = rng.choice(list(POSITIONS.items()))
    reach = END - extent - 0.5  # at this distance of its center from the middle, an object touches the margin

    def coordinate(direction: int) -> float:
        """The object is near the margin along the position's direction, and near the middle across it."""
        if direction:
            return 0.5 + direction * rng.uniform(0.75, 1.0) * reach
        return 0.5 + rng.uniform(-0.06, 0.06)

    x, y = coordinate(dx), coordinate(dy)
    main_object = SceneObject(*main, size, x, y, extent, rng.uniform(-8, 8))
    return Scene(split, background, main_object, second=None, relation=None, position=position)


def _pair(rng: random.Random, split: str, background: str, main: tuple[str, str], second: tuple[str, str]) -> Scene:
    """A scene with two objects. main, second: their colors and shapes."""
    relation = rng.choice(RELATIONS)
    sizes = ("large", "small") if relation == "behind" else rng.choice(SIZE_PAIRS)
    extents = [rng.uniform(*EXTENTS[size]) for size in sizes]
    if relation == "behind":
        centers = [[rng.uniform(START + extents[0], END - extents[0]) for _ in range(2)]] * 2
    else:
        centers = _side_by_side(rng, relation, extents)
    main_object, second_object = (
        SceneObject(*pair, size, x, y, extent, rng.uniform(-8, 8))
        for pair, size, (x, y), extent in zip((main, second), sizes, centers, extents, strict=True)
    )
    return Scene(split, background, main_object, second_object, relation, position=None)


def _side_by_side(rng: random.Random, relation: str, extents: Sequence[float]) -> list[list[float]]:
    """Centers [x, y] of the main and the second object, which do not overlap along the relation's axis.

    MAX_SLANT limits the distance across this axis, so that "left of" is never also "above". extents: half the widths of
    the two objects.
    """
    room = LENGTH - 2 * sum(extents)
    gap = rng.uniform(0.03, max(0.03, 0.6 * room))  # between the two objects
    distance = sum(extents) + gap
    start = START + rng.uniform(0, max(0.0, room - gap))
    axis = 0 if DIRECTIONS[relation][0] else 1
    if DIRECTIONS[relation][axis] < 0:  # the main object has the smaller coordinate
        main_along = start + extents[0]
        along = (main_along, main_along + distance)
    else:
        second_along = start + extents[1]
        along = (second_along + distance, second_along)
    main_across = rng.uniform(START + extents[0], END - extents[0])
    second_across = main_across + rng.uniform(-MAX_SLANT, MAX_SLANT) * distance
    across = (main_across, min(END - extents[1], max(START + extents[1], second_across)))
    return [[x, y] if axis == 0 else [y, x] for x, y in zip(along, across, strict=True)]


def draw_scene(scene: Scene, image_size: int) -> Image.Image:
    """The picture: RGB, `image_size` pixels wide and high."""
    size = image_size * SUPERSAMPLING
    image = Image.new("RGB", (size, size), BACKGROUNDS[scene.background])
    canvas = ImageDraw.Draw(image)
    for item in (scene.main, scene.second):  # the second object is drawn last, because it may be inside the main one
        if item is not None:
            canvas.polygon([(x * size, y * size) for x, y in _outline(item)], fill=COLORS[item.color])
    return image.reduce(SUPERSAMPLING)


def _outline(item: SceneObject) -> list[tuple[float, float]]:
    """The corners (x, y) of a rotated shape, as fractions of the image."""
    # Corners before rotation, around (0, 0), as multiples of the extent.
    arm, end = 0.32, 0.95  # of a cross: half the width of an arm, and its length from the center
    half_cross = [(-arm, -end), (arm, -end), (arm, -arm), (end, -arm), (end, arm), (arm, arm)]
    corners = {
        "circle": _radial([0.94] * 72),
        "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
        "triangle": [(0.0, -0.95), (0.98, 0.8), (-0.98, 0.8)],
        "star": _radial([1.0, 0.42] * 5),
        "cross": half_cross + [(-x, -y) for x, y in half_cross],
    }[item.shape]
    cos, sin = math.cos(math.radians(item.angle)), math.sin(math.radians(item.angle))
    rotated = [(x * cos - y * sin, x * sin + y * cos) for x, y in corners]
    return [(item.x + item.extent * x, item.y + item.extent * y) for x, y in rotated]


def _radial(radii: Sequence[float]) -> list[tuple[float, float]]:
    """Corners at equal angles, starting at the top, at the given distances from the center."""
    turn = 2 * math.pi / len(radii)
    return [(r * math.sin(i * turn), -r * math.cos(i * turn)) for i, r in enumerate(radii)]


def write_dataset(folder: Path, config: SceneConfig) -> None:
    """Writes `dataset.json` (Karpathy's layout) and `images/*.png` into a new folder. A failure leaves no folder.

    A complete folder of the same configuration is left unchanged. Raises UserError if the folder contains other files,
    because existing files are never overwritten.
    """
    marker = json.dumps({"format": FORMAT_VERSION, **asdict(config)})
    if _is_complete(folder, marker):
        return
    try:
        with atomic_folder(folder, replace=False, durable=False) as partial:
            (partial / "images").mkdir()
            images = [_write_image(partial, config, index) for index in range(config.num_images)]
            content = json.dumps({"dataset": "raycap-scenes", "images": images})
            (partial / "dataset.json").write_text(content, "utf-8")
            (partial / MARKER).write_text(marker, "utf-8")
    except OSError:
        if not _is_complete(folder, marker):  # if it is complete, another process has just written it
            raise


def _is_complete(folder: Path, marker: str) -> bool:
    """True if the folder has the data set of this marker, false if it is empty. Raises UserError for other content."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / MARKER).is_file() or (folder / MARKER).read_text("utf-8") != marker:
        problem = f"holds something else than the synthetic data set {marker}"
        raise UserError(f"{folder} {problem}; give an empty or new folder, or remove this one")
    return True


def _write_image(folder: Path, config: SceneConfig, index: int) -> Values:
    """Draws and saves one picture. Returns its entry for the Karpathy file."""
    scene, captions = make_scene(config.seed, index, config.language)
    filename = f"scene_{index:06d}.png"
    draw_scene(scene, config.image_size).save(folder / "images" / filename)
    tokenize = TOKENIZERS[suggested_tokenizer(config.language)].split
    sentids = list(range(index * CAPTIONS_PER_IMAGE, (index + 1) * CAPTIONS_PER_IMAGE))
    return {
        "filepath": "images",
        "filename": filename,
        "imgid": index,
        "cocoid": index + 1,
        "split": scene.split,
        "sentids": sentids,
        "sentences": [
            {"tokens": tokenize(caption), "raw": caption, "imgid": index, "sentid": sentid}
            for caption, sentid in zip(captions, sentids, strict=True)
        ],
    }


def main_object_hits(
    predictions: Mapping[object, str], references: Mapping[object, Sequence[str]], language: str = "en"
) -> dict[Any, bool]:
    """{image id: true if the predicted caption names the color and shape of the references' main object first}.

    Raises ValueError if the arguments have different images, or if the references of an image do not all name the same
    main object, as those of the synthetic data set do.
    """
    if not references or predictions.keys() != references.keys():
        raise ValueError("captions and references are not those of the same images; give one caption per image")
    hits = {}
    for image_id, captions in references.items():
        expected = {main_object(caption, language) for caption in captions}
        if len(expected) != 1 or None in expected:
            raise ValueError(
                f"the references of image {image_id} name {len(expected - {None})} main objects instead of one; "
                "this score is defined for the synthetic data set only"
            )
        hits[image_id] = main_object(predictions[image_id], language) in expected
    return hits


def regions_file_name(config: SceneConfig) -> str:
    """The name of the HDF5 file of a data set's regions, with a hash of everything that determines its content."""
    scenes = {key: value for key, value in asdict(config).items() if key != "language"}  # regions have no words
    settings = json.dumps([scenes, REGION_NOISE, REGION_JITTER, REGION_WIDTH], sort_keys=True)
    return f"synthetic-regions-{hashlib.sha256(settings.encode()).hexdigest()[:10]}.hdf5"


def scene_regions(config: SceneConfig) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (image id as in `write_dataset`, features (R, REGION_WIDTH), boxes (R, 4)) of every scene, in float32."""
    for index in range(config.num_images):
        scene, _ = make_scene(config.seed, index)
        yield index + 1, *regions_of(scene, np.random.default_rng([config.seed, index]), config.image_size)


def regions_of(scene: Scene, rng: np.random.Generator, image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulates a detector: features (R, REGION_WIDTH) and boxes (R, 4), x0 y0 x1 y1 in pixels, of one scene.

    The regions are the whole picture and each shape, sorted by size. Features start with one number for each color,
    shape and background: 1 if the region has it, 0 otherwise, plus noise. The corners, width and height of the box
    follow, as fractions of the picture.
    """
    shapes = [shape for shape in (scene.main, scene.second) if shape is not None]
    boxes = [(it.x - it.extent, it.y - it.extent, it.x + it.extent, it.y + it.extent) for it in shapes]
    corners = np.array([(0.0, 0.0, 1.0, 1.0), *boxes])  # as fractions of the picture
    corners[1:] += rng.normal(0, REGION_JITTER, corners[1:].shape)
    corners = corners.clip(0, 1)
    evidence = np.stack([_evidence(scene.background, shape) for shape in (None, *shapes)])
    evidence += rng.normal(0, REGION_NOISE, evidence.shape)
    sides = corners[:, 2:] - corners[:, :2]
    order = np.argsort(-sides.prod(1), kind="stable")
    features = np.concatenate((evidence, corners, sides), 1)
    return features[order].astype(np.float32), (corners[order] * image_size).astype(np.float32)


def _evidence(background: str, shape: SceneObject | None) -> np.ndarray:
    """The features of a region before noise, position and size are added. If shape is None: of the whole picture."""
    attributes = (background,) if shape is None else (shape.color, shape.shape)
    return np.array([float(name in attributes) for name in (*COLORS, *SHAPES, *BACKGROUNDS)])
