"""Constraint files: which words the caption of each image must hold, for constrained beam search.

JSON lines, one an image: {"image_id": 17, "constraints": ["horse", ["traffic light", "stoplight"]]}. A constraint is a
word, several words in a row, or a list of alternatives of these; a caption must hold one alternative of each. Images
that the file does not name have no constraints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from models.constraints import ConstraintAutomaton, build_automaton
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError

Alternatives = tuple[str, ...]
Constraints = dict[int, tuple[Alternatives, ...]]


def read_constraints(path: Path) -> Constraints:
    """{image id: constraints}; UserError with the line for what is not such a file."""
    found: Constraints = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"constraints {path} cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            image, constraints = row["image_id"], tuple(_alternatives(each) for each in row["constraints"])
            if not isinstance(image, int) or isinstance(image, bool):
                raise ValueError("image_id must be a whole number")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"constraints {path}: line {number} is no JSON object with image_id and a list constraints ({reason}); "
                f'expected for example {{"image_id": 17, "constraints": ["horse", ["cart", "wagon"]]}}'
            ) from error
        if image in found:
            raise UserError(f"constraints {path}: line {number} names image {image} again; give each image one line")
        found[image] = constraints
    return found


def _alternatives(value: object) -> Alternatives:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{value!r} is neither a word nor a list of words")
    return tuple(words)


def write_constraints(path: Path, constraints: Mapping[int, Sequence[Sequence[str]]]) -> None:
    """The file that `read_constraints` reads; images without constraints are left out."""
    lines = [
        json.dumps({"image_id": image, "constraints": [w[0] if len(w) == 1 else list(w) for w in own]})
        for image, own in constraints.items()
        if own
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    temporary.replace(path)


def unknown_words(alternatives: Iterable[str], vocabulary: Vocabulary) -> list[str]:
    """The words of alternatives that a vocabulary does not have."""
    words = [word for text in alternatives for word in vocabulary.tokenize(text)]
    return [word for word in words if word not in vocabulary.ids]


def build_machines(constraints: Constraints, vocabulary: Vocabulary, where: str) -> dict[int, ConstraintAutomaton]:
    """The machine of each image's constraints. UserError for a word outside the vocabulary, and for too many.

    where: the file's name, for the sentence.
    """
    machines = {}
    for image, own in constraints.items():
        ids = []
        for alternatives in own:
            tokens = [vocabulary.tokenize(text) for text in alternatives]
            if missing := [word for words in tokens for word in words if word not in vocabulary.ids]:
                raise UserError(
                    f"constraints {where}: image {image} needs the word {missing[0]!r}, which is not among the model's "
                    f"{len(vocabulary)} words; leave it out (`raycap constraints --model` does), or train with "
                    f"data.extra_vocabulary"
                )
            if not all(tokens):
                raise UserError(f"constraints {where}: image {image} has the constraint {alternatives}, without a word")
            ids.append([tuple(vocabulary.ids[word] for word in words) for words in tokens])
        try:
            machines[image] = build_automaton(ids, len(vocabulary))
        except ValueError as error:
            raise UserError(f"constraints {where}: image {image}: {error}") from error
    return machines


class Held(NamedTuple):
    """What became of the constraints of a split: images with any, and those whose caption holds all, some, none."""

    images: int
    all: int
    some: int
    none: int

    @classmethod
    def of(cls, held: Iterable[tuple[int, int]]) -> Held:
        """From (held, asked) of each image."""
        asked = [(own, total) for own, total in held if total]
        whole = sum(own >= total for own, total in asked)
        none = sum(own <= 0 for own, _ in asked)
        return cls(len(asked), whole, len(asked) - whole - none, none)

    def __str__(self) -> str:
        return f"{self.all} of {self.images} captions hold all of their constraints, {self.some} some, {self.none} none"
