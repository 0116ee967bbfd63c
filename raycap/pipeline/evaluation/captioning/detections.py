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
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document

MIN_OVERLAP = 0.85  # two boxes with at least this intersection over union are taken to show the same object
MAX_CONSTRAINTS = 3  # per image
MAX_BOXES = 1000  # per image, because each box is compared with each other; detectors give at most some hundreds

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
        for image, detection in _rows(read_document(path).decode(), f"detections {path}"):
            detections.setdefault(image, []).append(detection)
            if len(detections[image]) > MAX_BOXES:
                raise UserError(f"detections {path}: image {quoted(image)} has more than {MAX_BOXES} boxes")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"detections {path} cannot be read as text: {reason}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"detections {path} are neither COCO's JSON (categories, annotations with image_id, category_id, score, "
            f"bbox) nor JSON lines with image_id, label, score, box: {shown(reason)}"
        ) from error
    return detections


def _rows(text: str, name: str) -> Iterator[tuple[int, Detection]]:
    """(image id, detection) of each row, in either format. A UserError begins with `name`."""
    lines = text.strip().split("\n")
    if lines == [""]:
        return
    try:
        whole = parse_json(lines[0], name)  # the first of JSON lines, or a whole file in one line
    except UserError:
        whole = parse_json(text, name)
    if isinstance(whole, dict) and "annotations" in whole:
        names = {category["id"]: _text(category["name"]) for category in whole["categories"]}
        for row in whole["annotations"]:
            x, y, width, height = map(float, row["bbox"])
            yield _row(row["image_id"], names[row["category_id"]], row["score"], (x, y, x + width, y + height))
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = parse_json(line, "it")
                x0, y0, x1, y1 = map(float, row["box"])
                yield _row(row["image_id"], _text(row["label"]), row["score"], (x0, y0, x1, y1))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__} "
                raise ValueError(f"line {number}: {kind}{error}") from error


def _row(image: Any, label: str, score: Any, box: tuple[float, float, float, float]) -> tuple[int, Detection]:
    """The image id and the detection of one row. Raises ValueError for numbers that are not finite."""
    if not all(map(math.isfinite, (float(score), *box))):
        raise ValueError("its score and box must be finite numbers")
    return int(image), Detection(label.lower(), float(score), box)


def _text(value: Any) -> str:
    """A class name. Numbers are allowed as well. Raises TypeError for a list or an object."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"{quoted(value)} is not the name of a class")
    return str(value)


def read_hierarchy(path: Path, names: Path | None = None) -> dict[str, int]:
    """{class in lower case: number of levels below it, 0 for a leaf}. A class that occurs twice has the larger number.

    names: a CSV file of code and name, for a hierarchy that contains codes. Raises UserError for a malformed file.
    """
    try:
        tree, name_of = parse_json(read_document(path), "it"), {}
        if names is not None:
            rows = csv.reader(io.StringIO(read_document(names).decode(), newline=""))
            name_of = {row[0]: row[1] for row in rows if len(row) >= 2}
        heights: dict[str, int] = {}
        _add_heights(tree, name_of, heights)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise UserError(
            f'hierarchy {path}: not Open Images\' JSON of {{"LabelName": ..., "Subcategory": [...]}} '
            f"({type(error).__name__}: {shown(error)})"
        ) from error
    if names is None and heights and all(label.startswith("/") for label in heights):
        raise UserError(
            f"hierarchy {path} has codes such as {quoted(next(iter(heights)))} in place of names; give Open Images' "
            "CSV of class descriptions with --class-names"
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
    union = areas - width * height
    return width * height / union if union > 0 else 0.0  # products of extreme numbers are 0 or infinite
