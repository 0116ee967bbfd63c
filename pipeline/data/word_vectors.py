"""Word vectors from a text file in GloVe's form: a line a word, the word and its numbers with blanks between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.data.vocabulary import SPECIALS
from pipeline.errors import UserError

LISTED = 8  # missing words that are named


def read_word_vectors(path: Path, words: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(vectors (len(words), width) float32, found (len(words),) bool); rows that were not found are 0.

    The file, which may be larger than memory, is read line by line; numbers are parsed only of the words asked for. The
    first of several lines of a word counts; a first line of two whole numbers (word2vec's form: how many words, how
    wide) is passed over. Raises UserError for a file that cannot be read, has vectors of another width, or none of the
    words.
    """
    places = {word.encode(): place for place, word in enumerate(words)}
    vectors = np.zeros((len(words), width), np.float32)
    found = np.zeros(len(words), bool)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    parts = line.split()
                    header = len(parts) == 2 and all(part.isdigit() for part in parts)
                    _check_width(path, int(parts[1]) if header else len(parts) - 1, width)
                    if header:
                        continue
                word, _, rest = line.partition(b" ")
                place = places.get(word)
                if place is None or found[place]:
                    continue
                numbers = rest.split()
                if len(numbers) > width:
                    continue  # an entry of several words that begins with this one
                vectors[place] = _numbers(path, number, numbers, width)
                found[place] = True
    except OSError as error:
        raise UserError(f"model.word_vectors {path} cannot be read: {error.strerror or error}") from error
    if not found.any():
        raise UserError(
            f"model.word_vectors {path} has none of the vocabulary's {len(words)} words; give a text file of lines "
            f"with a word and {width} numbers"
        )
    return vectors, found


def _check_width(path: Path, wide: int, width: int) -> None:
    if wide != width:
        raise UserError(
            f"model.word_vectors {path} has vectors of {wide} numbers, and model.word_vector_width is {width}; "
            f"set it to {wide}, or give another file"
        )


def _numbers(path: Path, line: int, numbers: Sequence[bytes], width: int) -> np.ndarray:
    try:
        values = np.array([float(number) for number in numbers], np.float32)
    except ValueError as error:
        raise UserError(f"model.word_vectors {path}: line {line} holds what is no number ({error})") from error
    if len(values) != width or not np.isfinite(values).all():
        raise UserError(
            f"model.word_vectors {path}: line {line} has {len(values)} numbers, of which "
            f"{int(np.isfinite(values).sum())} are finite; expected {width}"
        )
    return values


def describe_missing(words: Sequence[str], found: np.ndarray) -> str:
    """How many words have a vector, and which have none; special tokens never have one and are not listed."""
    missing = [word for word, there in zip(words, found, strict=True) if not there and word not in SPECIALS]
    text = f"{int(found.sum()):,} of {len(words) - len(SPECIALS):,} words have a given vector"
    if missing:
        more = f" and {len(missing) - LISTED:,} more" if len(missing) > LISTED else ""
        text += f"; drawn at random: {', '.join(missing[:LISTED])}{more}"
    return text
