"""The words that a caption must contain, for constrained beam search: files of them, and words made from detections.

A file has one JSON line per image: {"image_id": 17, "constraints": ["horse", ["traffic light", "stoplight"]]}. A
constraint is a word, a phrase, or a list of alternatives. A caption satisfies it by containing one of the alternatives.
It must satisfy all constraints of its image, or as many as the optional key "at_least" says: the nocaps paper requires
2 of 3. Images without a line have no constraints.

Constraints are made from detections as in the Meshed-Memory paper for nocaps (appendix A.4, after the nocaps paper).
Classes that are parts of things or are seldom named are excluded. Of two boxes that overlap (intersection over union
0.85 or more) the one with the more general class is dropped, for example "mammal" in favor of "dog". The names of the
three most confident classes become constraints, without plurals or other forms.

The papers leave three points open. In this module, the class with more levels of the hierarchy below it is the more
general one, two classes of the same level both stay, and of several boxes of one class the most confident counts.

Detections are JSON in COCO's form, as nocaps publishes them ({"categories": [{"id", "name"}], "annotations":
[{"image_id", "category_id", "score", "bbox": [x, y, width, height]}]}). The hierarchy is Open Images' JSON,
{"LabelName", "Subcategory": [...]}, with the class names of the detections, or with codes ("/m/0bt9lr") and a CSV file
of code and name.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raycap.models.config import Values
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown
from raycap.pipeline.storage.atomic import write_text
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton

Alternatives = tuple[str, ...]
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


class ImageConstraints(NamedTuple):
    """The constraints of an image. A caption must satisfy `at_least` of them, or all if None."""

    constraints: tuple[Alternatives, ...]
    at_least: int | None = None


Constraints = dict[int, ImageConstraints]


def read_constraints(path: Path) -> Constraints:
    """Constraints by image id. Raises UserError naming a malformed line."""
    constraints: Constraints = {}
    try:
        lines = read_document(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"constraints {path} cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "it")
            image = row["image_id"]
            if type(image) is not int:  # isinstance would accept true and false
                raise ValueError("image_id must be a whole number")
            image_constraints = _image_constraints(row)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"constraints {path}: line {number} is no JSON object with image_id and a list constraints ({reason}); "
                f'expected for example {{"image_id": 17, "constraints": ["horse", ["cart", "wagon"]]}}'
            ) from error
        if image in constraints:
            shown = quoted(image)
            raise UserError(f"constraints {path}: line {number} names image {shown} again; give each image one line")
        constraints[image] = image_constraints
    return constraints


def _image_constraints(row: Any) -> ImageConstraints:
    """The constraints in a line of a file. ValueError, KeyError or TypeError for a malformed line."""
    values, at_least = row["constraints"], row.get("at_least")
    if not isinstance(values, list):
        raise ValueError("constraints must be a list")
    if at_least is not None and (type(at_least) is not int or not 1 <= at_least <= len(values)):
        raise ValueError(
            f"at_least is {quoted(at_least)}; it must be a whole number from 1 to the number of constraints, "
            f"{len(values)}"
        )
    return ImageConstraints(tuple(map(_alternatives, values)), at_least)


def _alternatives(value: object) -> Alternatives:
    """One constraint of a file as a tuple of alternatives. ValueError for other JSON."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{quoted(value)} is neither a word nor a list of words")
    return tuple(words)


def write_constraints(
    path: Path, constraints: Mapping[int, Sequence[Sequence[str]]], at_least: int | None = None
) -> None:
    """Writes the file that `read_constraints` reads; images without constraints are left out.

    at_least: the number of constraints that a caption must satisfy, of an image that has more; None for all.
    """
    lines = []
    for image, image_constraints in constraints.items():
        if image_constraints:
            values = [words[0] if len(words) == 1 else list(words) for words in image_constraints]
            row: Values = {"image_id": image, "constraints": values}
            if at_least is not None and at_least < len(values):
                row["at_least"] = at_least
            lines.append(json.dumps(row) + "\n")
    write_text(path, "".join(lines))


def unknown_words(alternatives: Iterable[str], vocabulary: Vocabulary) -> list[str]:
    """The words of the alternatives that are not in the vocabulary."""
    words = [word for text in alternatives for word in vocabulary.tokenize(text.lower())]
    return [word for word in words if word not in vocabulary.ids]


def load_automata(file: Path, images: Iterable[int], vocabulary: Vocabulary) -> dict[int, ConstraintAutomaton]:
    """The automata of those `images` that have constraints in a file. UserError as in `build_automata`."""
    wanted = set(images)
    constraints = {image: value for image, value in read_constraints(file).items() if image in wanted}
    return build_automata(constraints, vocabulary, str(file))


def build_automata(constraints: Constraints, vocabulary: Vocabulary, file: str) -> dict[int, ConstraintAutomaton]:
    """The automaton of each image's constraints, by image id.

    Raises UserError, which names `file`, for a word outside the vocabulary and for too many constraints.
    """
    from raycap.models.decoding.constraints import build_automaton  # imports torch, which `raycap check` does not

    automata = {}
    for image, (image_constraints, at_least) in constraints.items():
        label = f"constraints {file}: image {quoted(image)}"
        ids = []
        for alternatives in image_constraints:
            if missing := unknown_words(alternatives, vocabulary):
                raise UserError(
                    f"{label} needs the word {quoted(missing[0])}, which is not among the model's {len(vocabulary)} "
                    "words; leave it out (`raycap constraints --model` does), or train with data.extra_vocabulary"
                )
            tokens = [vocabulary.tokenize(text.lower()) for text in alternatives]
            if not all(tokens):
                raise UserError(f"{label} has the constraint {quoted(alternatives)}, without a word")
            ids.append([tuple(vocabulary.ids[word] for word in words) for words in tokens])
        try:
            automata[image] = build_automaton(ids, len(vocabulary), at_least)
        except ValueError as error:
            raise UserError(f"{label}: {error}") from error
    return automata


class Detection(NamedTuple):
    """A detected box: the name of its class in lower case, its confidence, and its corners x0, y0, x1, y1."""

    label: str
    score: float
    box: tuple[float, float, float, float]


def read_detections(path: Path) -> dict[int, list[Detection]]:
    """Detections by image id, in the order of a file in COCO's form. Raises UserError for other content."""
    detections: dict[int, list[Detection]] = {}
    try:
        content = parse_json(read_document(path), "it")
        names = {category["id"]: category["name"].lower() for category in content["categories"]}
        for row in content["annotations"]:
            x, y, width, height, score = map(float, (*row["bbox"], row["score"]))
            box = (x, y, x + width, y + height)
            if not all(map(math.isfinite, (*box, score))):
                raise ValueError("its scores and boxes must be finite numbers")
            found = detections.setdefault(int(row["image_id"]), [])
            found.append(Detection(names[row["category_id"]], score, box))
            if len(found) > MAX_BOXES:
                raise ValueError(f"image {quoted(row['image_id'])} has more than {MAX_BOXES} boxes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"detections {path} are not COCO's JSON (categories, annotations with image_id, category_id, score, bbox): "
            f"{shown(reason)}"
        ) from error
    return detections


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
