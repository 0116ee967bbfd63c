"""Constraint files: the words that each image's caption must contain, for constrained beam search.

A file has one JSON line per image: {"image_id": 17, "constraints": ["horse", ["traffic light", "stoplight"]]}. A
constraint is a word, a phrase, or a list of alternatives. A caption satisfies it by containing one of the alternatives.
It must satisfy all constraints of its image, or as many as the optional key "at_least" says: the nocaps paper requires
2 of 3. Images without a line have no constraints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raycap.models.decoding.constraints import ConstraintAutomaton, build_automaton
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted
from raycap.pipeline.storage.atomic import write_text
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document

Alternatives = tuple[str, ...]


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
            row: dict[str, Any] = {"image_id": image, "constraints": values}
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
