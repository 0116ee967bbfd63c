"""Word vectors from a text file in GloVe's format: each line has a word and its numbers, separated by spaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from raycap.pipeline.data.vocabulary import SPECIALS
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import shorten, shown
from raycap.pipeline.storage.untrusted.documents import open_regular_file

MAX_LISTED = 8  # a message names at most this many of the words without a vector
MAX_LINE_BYTES = 2**20  # a line with 300 numbers has 3 kB
MAX_DIGITS = 18  # longest whole number in word2vec's first line


def read_word_vectors(path: Path, words: Sequence[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The words' vectors (len(words), width) float32, and (len(words),) bool, true for words that the file has.

    A word that the file lacks has a vector of zeros. If a word occurs twice, its first line counts. The file may be
    larger than memory. Raises UserError if it cannot be read, has vectors of another width, or has none of the words.
    """
    rows = {word.encode(): row for row, word in enumerate(words)}
    vectors = np.zeros((len(words), width), np.float32)
    given = np.zeros(len(words), bool)
    for number, line in enumerate(_lines(path), 1):
        if number == 1 and _is_header(path, line.split(), width):
            continue
        word, _, rest = line.partition(b" ")
        row = rows.get(word)
        if row is None or given[row]:
            continue
        numbers = rest.split()
        if len(numbers) <= width:  # a longer line is skipped, because `word` is only the first word of a phrase
            vectors[row] = _parse(path, number, numbers, width)
            given[row] = True
    if not given.any():
        remedy = f"give a text file of lines with a word and {width} numbers"
        raise UserError(f"model.word_vectors {path} has none of the vocabulary's {len(words)} words; {remedy}")
    return vectors, given


def check_word_vectors(path: Path, width: int) -> None:
    """Raises UserError if the file cannot be read, or if its first line shows vectors of another width."""
    _is_header(path, next(_lines(path), b"").split(), width)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file. Raises UserError if it cannot be read or has a line of MAX_LINE_BYTES."""
    try:
        with open_regular_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES:
                    raise UserError(f"model.word_vectors {path}: line {number} has {MAX_LINE_BYTES} bytes or more")
                yield line
    except OSError as error:
        raise UserError(f"model.word_vectors {path} cannot be read: {error.strerror or error}") from error


def _is_header(path: Path, parts: Sequence[bytes], width: int) -> bool:
    """True if the first line is a header as in word2vec: number of words, and width. parts: the words of the line.

    Raises UserError if the line shows another width.
    """
    is_header = len(parts) == 2 and all(part.isdigit() and len(part) <= MAX_DIGITS for part in parts)
    actual = int(parts[1]) if is_header else len(parts) - 1
    if actual != width:
        problem = f"has vectors of {actual} numbers, and model.word_vector_width is {width}"
        raise UserError(f"model.word_vectors {path} {problem}; set it to {actual}, or give another file")
    return is_header


def _parse(path: Path, line: int, numbers: Sequence[bytes], width: int) -> np.ndarray:
    """The vector (width,) float32 of one line. Raises UserError unless it has `width` finite numbers."""
    try:
        values = np.array([float(number) for number in numbers], np.float32)
    except ValueError as error:
        reason = shown(error)
        raise UserError(f"model.word_vectors {path}: line {line} holds a text that is no number ({reason})") from error
    num_finite = int(np.isfinite(values).sum())
    if not len(values) == num_finite == width:
        counts = f"{len(values)} numbers, of which {num_finite} are finite; expected {width}"
        raise UserError(f"model.word_vectors {path}: line {line} has {counts}")
    return values


def describe_missing(words: Sequence[str], given: np.ndarray) -> str:
    """How many words have a vector, and which lack one, for the log. Special tokens never have one and do not count."""
    missing = [word for word, has_vector in zip(words, given, strict=True) if not has_vector and word not in SPECIALS]
    listed = f"; drawn at random: {shorten(missing, MAX_LISTED)}" if missing else ""
    return f"{int(given.sum()):,} of {len(words) - len(SPECIALS):,} words have a given vector{listed}"
