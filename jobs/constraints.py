"""`raycap constraints`: from an object detector's boxes to the words that captions must hold."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from pipeline.captioning.constraints import unknown_words, write_constraints
from pipeline.captioning.detections import EXCLUDED, choose_constraints, read_detections, read_hierarchy
from pipeline.data.vocabulary import Vocabulary
from pipeline.errors import UserError

logger = logging.getLogger(__name__)


def constraints(
    detections: Path,
    hierarchy: Path | None,
    out: Path,
    *,
    class_names: Path | None = None,
    exclude: Path | None = None,
    most: int = 3,
    overlap: float = 0.85,
    model: Path | None = None,
) -> int:
    """Writes a constraint file from detections. Raises UserError for files that cannot be read.

    hierarchy: Open Images' JSON, without which overlapping boxes all stay. exclude: a file of class names, one a line,
    in place of the nocaps paper's 39. model: a bundle; classes with words that it does not know are left out and said.
    """
    found = read_detections(detections)
    heights = read_hierarchy(hierarchy, class_names) if hierarchy is not None else {}
    excluded = frozenset(_lines(exclude)) if exclude is not None else EXCLUDED
    vocabulary = _vocabulary(model) if model is not None else None
    unsaid: Counter[str] = Counter()
    if vocabulary is not None:
        labels = {each.label for own in found.values() for each in own} - excluded
        unknown = {label for label in labels if unknown_words([label], vocabulary) or not vocabulary.tokenize(label)}
        unsaid = Counter(each.label for own in found.values() for each in own if each.label in unknown)
        excluded |= unknown
    chosen = {
        image: [
            (label,)
            for label in choose_constraints(own, heights, max_constraints=most, overlap=overlap, excluded=excluded)
        ]
        for image, own in found.items()
    }
    write_constraints(out, chosen)
    having = [own for own in chosen.values() if own]
    logger.info(
        f"{sum(map(len, found.values()))} detections in {len(found)} images: {sum(map(len, having))} constraints in "
        f"{len(having)} images, {len({own for each in having for own in each})} different classes"
    )
    if heights:
        strange = {each.label for own in found.values() for each in own} - heights.keys()
        if strange:
            logger.info(
                f"{len(strange)} classes are not in the hierarchy and count as leaves, such as {min(strange)!r}"
            )
    if unsaid:
        listed = ", ".join(label for label, _ in unsaid.most_common(5)) + (", ..." if len(unsaid) > 5 else "")
        logger.info(f"classes left out, as the model lacks their words: {len(unsaid)} ({listed})")
    logger.info(f"constraints  {out}")
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip().lower() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--exclude {path} cannot be read as text: {error}") from error


def _vocabulary(model: Path) -> Vocabulary:
    try:
        return Vocabulary.load(model / "vocabulary.json")
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model} is not a model bundle: {error}") from error
