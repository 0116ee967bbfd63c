"""`raycap constraints`: turns an object detector's boxes into words that captions must contain."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.constraints import (
    EXCLUDED,
    choose_constraints,
    read_detections,
    read_hierarchy,
    unknown_words,
    write_constraints,
)
from raycap.pipeline.runtime.names import quoted, shorten
from raycap.pipeline.storage.untrusted.documents import read_document

logger = logging.getLogger(__name__)

NUM_LISTED_CLASSES = 5  # the log names this many of the classes that the model lacks


def constraints(
    detections: Annotated[Path, typer.Option(help="Boxes with classes: COCO's JSON.")],
    out: Annotated[Path, typer.Option(help="The constraint file, for `raycap evaluate --constraints`.")],
    hierarchy: Annotated[
        Path | None, typer.Option(help="Open Images' class hierarchy. Without it, overlapping boxes are all used.")
    ] = None,
    class_names: Annotated[Path | None, typer.Option(help="CSV of code and name, for a hierarchy of codes.")] = None,
    exclude: Annotated[
        Path | None, typer.Option(help="Classes to leave out, one per line. The default is the nocaps paper's 39.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Constraints per image; the most confident are used.")] = 3,
    overlap: Annotated[
        float, typer.Option(help="Of two boxes whose overlap exceeds this, the more general class is left out.")
    ] = 0.85,
    at_least: Annotated[
        int | None, typer.Option(min=1, help="A caption must satisfy this many of an image's constraints; else all.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A bundle: leave out classes whose words it lacks.")] = None,
) -> int:
    """Turn detected objects into words for captions.

    `raycap evaluate --constraints` searches for captions that contain these words.

    Example: raycap constraints --detections boxes.json --hierarchy hierarchy.json --out constraints.jsonl
    """
    boxes = read_detections(detections)
    heights = read_hierarchy(hierarchy, class_names) if hierarchy is not None else {}
    labels = Counter(box.label for image_boxes in boxes.values() for box in image_boxes)
    excluded = frozenset(_read_classes(exclude)) if exclude is not None else EXCLUDED
    outside_vocabulary: set[str] = set()
    if model is not None:
        vocabulary = _read_vocabulary(model)
        candidates = labels.keys() - excluded
        outside_vocabulary = {
            label for label in candidates if unknown_words([label], vocabulary) or not vocabulary.tokenize(label)
        }
        excluded |= outside_vocabulary
    chosen = {
        image: choose_constraints(image_boxes, heights, max_constraints=most, overlap=overlap, excluded=excluded)
        for image, image_boxes in boxes.items()
    }
    # A constraint is a tuple of alternatives, of which the caption must contain one. Here each has one alternative.
    write_constraints(out, {image: [(label,) for label in words] for image, words in chosen.items()}, at_least)
    all_words = [label for words in chosen.values() for label in words]
    logger.info(
        f"{labels.total()} detections in {len(boxes)} images: {len(all_words)} constraints in "
        f"{sum(map(bool, chosen.values()))} images, {len(set(all_words))} different classes"
    )
    if heights and (missing := labels.keys() - heights.keys()):
        logger.info(
            f"{len(missing)} classes are not in the hierarchy and count as leaves, such as {quoted(min(missing))}"
        )
    if outside_vocabulary:
        by_frequency = [label for label, _ in labels.most_common() if label in outside_vocabulary]
        listed = shorten(by_frequency, NUM_LISTED_CLASSES)
        logger.info(f"classes left out because the model lacks their words: {len(outside_vocabulary)} ({listed})")
    logger.info(f"constraints  {out}")
    return 0


def _read_classes(path: Path) -> list[str]:
    """The class names in a file with one per line, in lower case."""
    try:
        return [line.strip().lower() for line in read_document(path).decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--exclude {path} cannot be read as text: {reason}") from error


def _read_vocabulary(model: Path) -> Vocabulary:
    try:
        return Vocabulary.load(model / "vocabulary.json")
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model} is not a model bundle: {error}") from error
