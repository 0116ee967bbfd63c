"""Finds captions that show that the tokenizer does not fit their script."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from raycap.pipeline.data.language.tokenizers import clusters, is_without_spaces
from raycap.pipeline.runtime.names import quoted

NORMALIZING = ("unicode", "characters", "subword")  # tokenizers that give the same words for all normal forms of a text
MAX_SHOWN = 60  # characters of an example


@dataclass
class CaptionProblems:
    """The captions that a tokenizer of `TOKENIZERS` splits badly."""

    tokenizer: str
    total: int = 0
    one_word: list[str] = field(default_factory=list)
    unsplit: int = 0  # captions of one word in a script without spaces between words
    cut: list[str] = field(default_factory=list)  # captions in which letters are split from their marks
    composed: list[str] = field(default_factory=list)  # captions that are in NFC, but not in NFD
    decomposed: list[str] = field(default_factory=list)  # captions that are not in NFC
    without_spaces: int = 0  # captions with a letter of a script without spaces between words

    def add(self, caption: str, words: Sequence[str]) -> None:
        """Checks a caption and the words that the tokenizer made of it."""
        self.total += 1
        if len(words) == 1:
            self.one_word.append(caption)
            self.unsplit += is_without_spaces(caption)
        if caption.isascii():
            return
        self.without_spaces += is_without_spaces(caption)
        if cuts_letters(caption, words):
            self.cut.append(caption)
        if not unicodedata.is_normalized("NFC", caption):
            self.decomposed.append(caption)
        elif not unicodedata.is_normalized("NFD", caption):
            self.composed.append(caption)

    @property
    def suggestion(self) -> str:
        """The value of `data.tokenizer` that fits the scripts of the captions."""
        return "characters" if 2 * self.without_spaces > self.total else "unicode"

    def warnings(self) -> Iterator[str]:
        """A sentence for each kind of problem."""
        remedy = f"set data.tokenizer to {self.suggestion}" if self.suggestion != self.tokenizer else "look at them"
        key = f"data.tokenizer = {self.tokenizer}"
        if self.one_word:
            counted = "1 caption is" if len(self.one_word) == 1 else f"{len(self.one_word)} captions are"
            one_remedy = remedy if self.unsplit else "look at them"
            yield f"{counted} one word for {key}, such as {_first(self.one_word)}; {one_remedy}"
        if self.cut:
            problem = f"splits letters from their marks in {len(self.cut)} captions"
            yield f"{key} {problem}, such as {_first(self.cut)}; {remedy}"
        if self.composed and self.decomposed and self.tokenizer not in NORMALIZING:
            yield (
                f"{len(self.decomposed)} captions are not in the normal form NFC, such as {_first(self.decomposed)}, "
                f"and {len(self.composed)} are, such as {_first(self.composed)}: equal words count as different; "
                f"{remedy}"
            )


def _first(captions: Sequence[str]) -> str:
    """The first caption in quotes, cut to MAX_SHOWN characters."""
    return quoted(captions[0] if len(captions[0]) <= MAX_SHOWN else f"{captions[0][:MAX_SHOWN]}...")


def cuts_letters(caption: str, words: Sequence[str]) -> bool:
    """True if the tokenizer split a grapheme cluster, such as a letter and its vowel sign, into two words."""
    text = caption.lower()
    return any(
        len(clusters(left + right)) < len(clusters(left)) + len(clusters(right)) and left + right in text
        for left, right in pairwise(words)
    )
