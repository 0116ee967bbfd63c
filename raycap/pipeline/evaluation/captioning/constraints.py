"""Files of words that captions must contain, for constrained beam search.

A file has one JSON line per image: {"image_id": 17, "constraints": ["horse", ["traffic light", "stoplight"]]}. A
constraint is a word, a phrase, or a list of alternatives of which a caption must contain at least one. A caption must
satisfy all constraints of its image, or as many as the optional key "at_least" says. Images without a line have no
constraints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

from raycap.pipeline.data.dataset import ImageId
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import quoted, shown
from raycap.pipeline.storage.untrusted.documents import parse_json, read_document

if TYPE_CHECKING:
    from raycap.models.decoding.constraints import ConstraintAutomaton


class ImageConstraints(NamedTuple):
    """The constraints of an image, each a tuple of alternatives. A caption must contain one alternative of each.

    at_least: the number of constraints that a caption must satisfy, or None if it must satisfy all.
    """

    constraints: tuple[tuple[str, ...], ...]
    at_least: int | None = None


def read_constraints(path: Path) -> dict[ImageId, ImageConstraints]:
    """Reads a file of constraints, by image id. If a line is malformed, raises UserError with its number."""
    row_type = TypeAdapter(tuple[StrictInt | StrictStr, list[str | list[str]], StrictInt | None])
    found: dict[ImageId, ImageConstraints] = {}
    try:
        lines = read_document(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"constraints {path} cannot be read as text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "it")
            values = (row["image_id"], row["constraints"], row.get("at_least"))
            image, constraints, at_least = row_type.validate_python(values)
            alternatives = tuple((each,) if isinstance(each, str) else tuple(each) for each in constraints)
            if () in alternatives or not all(text.strip() for texts in alternatives for text in texts):
                raise ValueError("a constraint has no words")
            if at_least is not None and not 1 <= at_least <= len(constraints):
                raise ValueError(f"at_least must be 1 to the number of constraints, {len(constraints)}")
            if image in found:
                raise ValueError(f"it names image {quoted(image)} again; give each image one line")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else shown(error)
            if isinstance(error, ValidationError):
                reason = error.errors()[0]["msg"]
            raise UserError(
                f"constraints {path}: line {number} is no JSON object with image_id and a list constraints ({reason}); "
                'expected for example {"image_id": 17, "constraints": ["horse", ["cart", "wagon"]]}'
            ) from error
        found[image] = ImageConstraints(alternatives, at_least)
    return found


def load_automata(file: Path, images: Iterable[ImageId], vocabulary: Vocabulary) -> dict[ImageId, ConstraintAutomaton]:
    """Reads the constraints of these `images` and builds their automata. Raises UserError like `build_automata`."""
    wanted = set(images)
    constraints = {image: value for image, value in read_constraints(file).items() if image in wanted}
    return build_automata(constraints, vocabulary, str(file))


def build_automata(
    constraints: Mapping[ImageId, ImageConstraints], vocabulary: Vocabulary, file: str
) -> dict[ImageId, ConstraintAutomaton]:
    """Builds the automaton of each image's constraints, by image id. file: for messages.

    Raises UserError for a word outside the vocabulary, and for too many constraints.
    """
    from raycap.models.decoding.constraints import build_automaton  # here, because `raycap check` must not load torch

    automata = {}
    for image, (image_constraints, at_least) in constraints.items():
        label = f"constraints {file}: image {quoted(image)}"
        ids = []
        for alternatives in image_constraints:
            tokens = [vocabulary.tokenize(text.lower()) for text in alternatives]
            if missing := [word for words in tokens for word in words if word not in vocabulary.ids]:
                raise UserError(
                    f"{label} needs the word {quoted(missing[0])}, which is not among the model's {len(vocabulary)} "
                    "words; leave it out, or train with data.extra_vocabulary"
                )
            if not all(tokens):
                raise UserError(f"{label} has the constraint {quoted(alternatives)}, without a word")
            ids.append([tuple(vocabulary.ids[word] for word in words) for words in tokens])
        try:
            automata[image] = build_automaton(ids, len(vocabulary), at_least)
        except ValueError as error:
            raise UserError(f"{label}: {error}") from error
    return automata
