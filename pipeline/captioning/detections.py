"""Makes constraints from detections as the Meshed-Memory paper does for nocaps (appendix A.4, after the nocaps paper).

Classes that are parts of things or are seldom named are excluded. Of two boxes that overlap (intersection over union
0.85 or more) the one with the more general class is dropped, for example "mammal" in favor of "dog". The names of the
three most confident classes become constraints, without plurals or other forms.

The papers leave three points open. In this module, the class with more levels of the hierarchy below it is the more
general one, two classes of the same level both stay, and of several boxes of one class the most confident counts.

Detections are JSON in COCO's form, as nocaps publishes them ({"categories": [{"id", "name"}], "annotations":
[{"image_id", "category_id", "score", "bbox": [x, y, width, height]}]}), or JSON lines {"image_id", "label", "score",
"box": [x0, y0, x1, y1]}. The hierarchy is Open Images' JSON, {"LabelName", "Subcategory": [...]}, with the class names
of the detections, or with codes ("/m/0bt9lr") and a CSV file of code and name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import UserError

MIN_OVERLAP = 0.85  # two boxes with at least this intersection over union are taken to show the same object
MAX_CONSTRAINTS = 3  # per image

# The 39 classes of Open Images that the nocaps paper excludes: parts, classes seldom named, classes that COCO covers.
EXCLUDED = frozenset(
    [
        *(f"human {part}" for part in ("arm", "beard", "body", "ear", "eye", "face", "foot", "hair", "hand", "head")),
        *("human leg", "human mouth", "human nose", "person", "man", "woman", "boy", "girl", "mammal", "skull", "tree"),
        *("plant", "building", "clothing", "footwear", "fashion accessory", "personal care", "bathroom accessory"),
        *("plumbing fixture", "door handle", "hiking equipment", "sports equipment", "land vehicle", "auto part"),
        *("wheel", "bicycle wheel", "tire", "seat belt", "vehicle registration plate"),
    ]
)


class Detection(NamedTuple):
    """A detected box: the name of its class in lower case, its confidence, and its corners x0, y0, x1, y1."""

    label: str
    score: float
    box: tuple[float, float, float, float]


def read_detections(path: Path) -> dict[int, list[Detection]]:
    """Detections by image id, in the order of the file. Raises UserError for a file in neither of the two formats."""
    detections: dict[int, list[Detection]] = {}
    try:
        for image, detection in _rows(path.read_text(encoding="utf-8")):
            detections.setdefault(image, []).append(detection)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"detections {path} cannot be read as text: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"detections {path} are neither COCO's JSON (categories, annotations with image_id, category_id, score, "
            f"bbox) nor JSON lines with image_id, label, score, box: {reason}"
        ) from error
    return detections


def _rows(text: str) -> Iterator[tuple[int, Detection]]:
    """(image id, detection) of each row, in either format."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "annotations" in whole:
        names = {category["id"]: str(category["name"]) for category in whole["categories"]}
        for row in whole["annotations"]:
            x, y, width, height = map(float, row["bbox"])
            box = (x, y, x + width, y + height)
            yield int(row["image_id"]), Detection(names[row["category_id"]].lower(), float(row["score"]), box)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                x0, y0, x1, y1 = map(float, row["box"])
                yield int(row["image_id"]), Detection(str(row["label"]).lower(), float(row["score"]), (x0, y0, x1, y1))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number}: {type(error).__name__} {error}") from error


def read_hierarchy(path: Path, names: Path | None = None) -> dict[str, int]:
    """{class in lower case: number of levels below it, 0 for a leaf}. A class that occurs twice has the larger number.

    names: a CSV file of code and name, for a hierarchy that contains codes. Raises UserError for a malformed file.
    """
    try:
        tree, name_of = json.loads(path.read_text(encoding="utf-8")), {}
        if names is not None:
            with names.open(encoding="utf-8", newline="") as file:
                name_of = {row[0]: row[1] for row in csv.reader(file) if len(row) >= 2}
        heights: dict[str, int] = {}
        _add_heights(tree, name_of, heights)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(
            f'hierarchy {path}: not Open Images\' JSON of {{"LabelName": ..., "Subcategory": [...]}} '
            f"({type(error).__name__}: {error})"
        ) from error
    if names is None and heights and all(label.startswith("/") for label in heights):
        raise UserError(
            f"hierarchy {path} has codes such as {next(iter(heights))!r} in place of names; give Open Images' CSV of "
            "class descriptions with --class-names"
        )
    return heights


def _add_heights(node: Mapping[str, Any], names: Mapping[str, str], heights: dict[str, int]) -> int:
    """The number of levels below a node. Adds this number of the node and of all its descendants to `heights`.

    names: {code: name}, empty for a hierarchy of names. heights: {class in lower case: number of levels below it}.
    """
    below = [_add_heights(child, names, heights) for child in node.get("Subcategory", ())]
    label = names.get(node["LabelName"], str(node["LabelName"])).lower()
    height = max(below, default=-1) + 1
    heights[label] = max(height, heights.get(label, 0))
    return height


def choose_constraints(
    detections: Iterable[Detection],
    hierarchy: Mapping[str, int],
    *,
    max_constraints: int = MAX_CONSTRAINTS,
    overlap: float = MIN_OVERLAP,
    excluded: Collection[str] = EXCLUDED,
) -> list[str]:
    """The classes that become constraints of an image, most confident first.

    hierarchy: {class: number of levels below it}; classes that it lacks count as leaves. overlap: the smallest
    intersection over union at which the more general of two classes is dropped. excluded: classes to leave out.
    """
    candidates = [detection for detection in detections if detection.label not in excluded]
    specific = [
        detection
        for detection in candidates
        if not any(
            hierarchy.get(detection.label, 0) > hierarchy.get(other.label, 0)
            and intersection_over_union(detection.box, other.box) >= overlap
            for other in candidates
        )
    ]
    ranked = sorted(specific, key=lambda detection: -detection.score)
    return list(dict.fromkeys(detection.label for detection in ranked))[:max_constraints]


def intersection_over_union(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (x0, y0, x1, y1); 0 for boxes that do not overlap."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / (areas - width * height)
