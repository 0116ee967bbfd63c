"""What goes wrong when a tokenizer does not fit the script of the captions."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raycap.pipeline.data.language.tokenizers import clusters, is_without_spaces
from raycap.pipeline.runtime.names import quoted

NORMALIZING = ("unicode", "characters", "subword")  # tokenizers for which normal forms make no difference
MAX_SHOWN = 60  # characters of an example


@dataclass
class Tally:
    """How many captions have a property, and the first of them."""

    count: int = 0
    example: str = ""

    def add(self, caption: str) -> None:
        self.example = self.example if self.count else caption
        self.count += 1

    def __str__(self) -> str:
        text = self.example if len(self.example) <= MAX_SHOWN else f"{self.example[:MAX_SHOWN]}..."
        return quoted(text)


@dataclass
class CaptionProblems:
    """Counts captions that a tokenizer of `TOKENIZERS` does not split into words."""

    tokenizer: str
    total: int = 0
    one_word: Tally = field(default_factory=Tally)
    unsplit: int = 0  # captions of one word in a script without spaces between words
    cut: Tally = field(default_factory=Tally)
    composed: Tally = field(default_factory=Tally)
    decomposed: Tally = field(default_factory=Tally)
    without_spaces: int = 0  # captions with a letter of a script without spaces between words

    def add(self, caption: str, words: Sequence[str]) -> None:
        """Counts a caption and its words."""
        self.total += 1
        if len(words) == 1:
            self.one_word.add(caption)
            self.unsplit += is_without_spaces(caption)
        if caption.isascii():
            return
        self.without_spaces += is_without_spaces(caption)
        if cuts_letters(caption, words):
            self.cut.add(caption)
        if not unicodedata.is_normalized("NFC", caption):
            self.decomposed.add(caption)
        elif not unicodedata.is_normalized("NFD", caption):
            self.composed.add(caption)

    @property
    def suggestion(self) -> str:
        """The value of `data.tokenizer` that fits the scripts of the captions."""
        return "characters" if 2 * self.without_spaces > self.total else "unicode"

    def warnings(self) -> Iterator[str]:
        """A sentence for each kind of problem."""
        remedy = f"set data.tokenizer to {self.suggestion}" if self.suggestion != self.tokenizer else "look at them"
        if self.one_word.count:
            counted = "1 caption is" if self.one_word.count == 1 else f"{self.one_word.count} captions are"
            yield f"{counted} one word for data.tokenizer = {self.tokenizer}, such as {self.one_word}; " + (
                remedy if self.unsplit else "look at them"
            )
        if self.cut.count:
            problem = f"data.tokenizer = {self.tokenizer} splits letters from their marks in {self.cut.count} captions"
            yield f"{problem}, such as {self.cut}; {remedy}"
        if self.composed.count and self.decomposed.count and self.tokenizer not in NORMALIZING:
            yield (
                f"{self.decomposed.count} captions are not in the normal form NFC, such as {self.decomposed}, and "
                f"{self.composed.count} are, such as {self.composed}: equal words count as different; {remedy}"
            )


def cuts_letters(caption: str, words: Sequence[str]) -> bool:
    """Whether two neighboring words of a caption share a grapheme cluster, such as a letter and its vowel sign."""
    text = caption.lower()
    return any(
        len(clusters(left + right)) < len(clusters(left)) + len(clusters(right)) and left + right in text
        for left, right in pairwise(words)
    )
