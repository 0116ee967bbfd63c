"""Constraint files: the words that each image's caption must contain, for constrained beam search.

A file has one JSON line per image: {"image_id": 17, "constraints": ["horse", ["traffic light", "stoplight"]]}. A
constraint is a word, a phrase, or a list of alternatives. A caption satisfies it by containing one of the alternatives.
Images without a line have no constraints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from models.constraints import ConstraintAutomaton, build_automaton
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError
from pipeline.storage.atomic import write_text
from pipeline.untrusted.documents import parse_json
from pipeline.untrusted.files import read_document
from pipeline.untrusted.names import quoted

Alternatives = tuple[str, ...]
Constraints = dict[int, tuple[Alternatives, ...]]


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
            if not isinstance(row["constraints"], list):
                raise ValueError("constraints must be a list")
            image_constraints = tuple(_alternatives(constraint) for constraint in row["constraints"])
            if type(image) is not int:  # isinstance would accept true and false
                raise ValueError("image_id must be a whole number")
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


def _alternatives(value: object) -> Alternatives:
    """One constraint of a file as a tuple of alternatives. ValueError for other JSON."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{quoted(value)} is neither a word nor a list of words")
    return tuple(words)


def write_constraints(path: Path, constraints: Mapping[int, Sequence[Sequence[str]]]) -> None:
    """Writes the file that `read_constraints` reads; images without constraints are left out."""
    lines = []
    for image, image_constraints in constraints.items():
        if image_constraints:
            values = [words[0] if len(words) == 1 else list(words) for words in image_constraints]
            lines.append(json.dumps({"image_id": image, "constraints": values}) + "\n")
    write_text(path, "".join(lines))


def unknown_words(alternatives: Iterable[str], vocabulary: Vocabulary) -> list[str]:
    """The words of the alternatives that are not in the vocabulary."""
    words = [word for text in alternatives for word in vocabulary.tokenize(text)]
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
    for image, image_constraints in constraints.items():
        label = f"constraints {file}: image {quoted(image)}"
        ids = []
        for alternatives in image_constraints:
            if missing := unknown_words(alternatives, vocabulary):
                raise UserError(
                    f"{label} needs the word {quoted(missing[0])}, which is not among the model's {len(vocabulary)} "
                    "words; leave it out (`raycap constraints --model` does), or train with data.extra_vocabulary"
                )
            tokens = [vocabulary.tokenize(text) for text in alternatives]
            if not all(tokens):
                raise UserError(f"{label} has the constraint {quoted(alternatives)}, without a word")
            ids.append([tuple(vocabulary.ids[word] for word in words) for words in tokens])
        try:
            automata[image] = build_automaton(ids, len(vocabulary))
        except ValueError as error:
            raise UserError(f"{label}: {error}") from error
    return automata
