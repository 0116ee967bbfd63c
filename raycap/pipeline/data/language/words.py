"""Words and characters of captions in any script, by Unicode's rules for text segmentation (UAX #29).

Both tokenizers normalize a caption first: composed (NFC), in lower case, without invisible marks of direction. Equal
texts in different normal forms therefore have equal tokens, and combining marks remain parts of their words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

# Soft hyphens, marks of direction, word joiners and byte order marks. Zero-width joiners and non-joiners are kept:
# they change the spelling of words, for example in Persian and Sinhala.
_INVISIBLE = re.compile("[\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")

# Scripts that are written without spaces between words. The extensions of a script (`scx`) include characters that it
# shares with another one, such as the prolonged sound mark of Hiragana and Katakana.
_SCRIPTS = (
    "Hani", "Hira", "Kana", "Bopo", "Yiii", "Thai", "Laoo", "Khmr", "Mymr", "Tale", "Talu", "Lana", "Tavt", "Java",
    "Bali",
)  # fmt: skip


class _Patterns(NamedTuple):
    """Compiled patterns of the package regex.

    words: the segments of a text that may be words. clusters: of a text. runs: pairs of texts, of which one is empty: a
    letter of a script without spaces with its marks, or all characters up to the next one. starts_without_space:
    matches a text that begins with a letter of such a script. finds_without_space: finds such a letter.
    """

    words: Callable[[str], list[str]]
    clusters: Callable[[str], list[str]]
    runs: Callable[[str], list[tuple[str, str]]]
    starts_without_space: Callable[[str], object]
    finds_without_space: Callable[[str], object]


@cache
def _patterns() -> _Patterns:
    import regex

    scripts = "".join(rf"\p{{scx={name}}}" for name in _SCRIPTS)
    letter = rf"[[{scripts}]&&[\p{{L}}\p{{M}}\p{{Nl}}]]"
    return _Patterns(
        regex.compile(_word_pattern(), regex.VERSION1).findall,
        regex.compile(r"\X", regex.VERSION1).findall,
        regex.compile(rf"((?={letter})\X\p{{M}}*+)|((?:(?!{letter})\X)++)", regex.VERSION1).findall,
        regex.compile(letter, regex.VERSION1).match,
        regex.compile(letter, regex.VERSION1).search,
    )


def _word_pattern() -> str:
    """A segment by the rules WB4 to WB13b of UAX #29 that contains more than connectors, or a letter by itself.

    The package's own boundaries (its flag WORD) differ from the rules where a mark precedes a colon or an apostrophe.
    """

    def unit(*classes: str) -> str:
        """A character of these values of Word_Break with the marks after it, which the rules ignore (WB4)."""
        return "[" + "".join(rf"\p{{WB={name}}}" for name in classes) + "]" + marks

    marks = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+"
    letters, hebrew = unit("ALetter", "Hebrew_Letter"), unit("Hebrew_Letter")
    numbers, kana, connectors = unit("Numeric"), unit("Katakana"), unit("ExtendNumLet")
    within_word = unit("MidLetter", "MidNumLet", "Single_Quote")
    within_number = unit("MidNum", "MidNumLet", "Single_Quote")
    run = (
        rf"(?:{hebrew}{unit('Double_Quote')}(?={hebrew})"
        rf"|{letters}(?:{within_word}(?={letters}))?|{numbers}(?:{within_number}(?={numbers}))?)++"
    )
    part = rf"(?:{run}|(?:{kana})++)"
    ending = rf"(?:(?<={hebrew.removesuffix('+')}){unit('Single_Quote')}|(?:{connectors})*+)"
    other = rf"[[\p{{L}}\p{{N}}]&&\p{{WB=Other}}]{marks}"
    return rf"(?:{connectors})*+{part}(?:(?:{connectors})++{part})*{ending}|{other}"


def normalized(caption: str) -> str:
    """The caption composed (NFC), in lower case, and without invisible marks of direction.

    The narrow no-break space, which stands before punctuation in French, becomes a space. Unicode's word boundaries
    would make it a part of the word.
    """
    if caption.isascii():
        return caption.lower()
    caption = caption.replace("\u202f", " ")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", _INVISIBLE.sub("", caption)).lower())


def has_word(text: str) -> bool:
    """Whether a text contains a letter or a digit."""
    return any(map(str.isalnum, text))


def unicode_words(caption: str) -> list[str]:
    """The words of a caption: its segments by Unicode's default word boundaries that contain a letter or a digit.

    Marks, joiners, apostrophes and decimal points inside a word do not split it. A Han character or Hiragana sign is a
    word by itself, and so is a Thai letter with its marks; see `characters` for these scripts.
    """
    return [word for word in _patterns().words(normalized(caption)) if has_word(word)]


def characters(caption: str) -> list[str]:
    """The characters of scripts without spaces, and the words of all others.

    A token is one letter with its marks (an extended grapheme cluster and the marks after it) if its script separates
    no words by spaces: Han, Hiragana, Katakana, Thai, Lao, Khmer, Burmese and a few others. The text between such
    letters, for example a run of Latin letters or of digits, is split as `unicode_words` does.
    """
    tokens: list[str] = []
    for letter, others in _patterns().runs(normalized(caption)):
        if others:
            words = _patterns().words(others)
            # a sign of a script without spaces that has no letter before it is no word
            tokens += [word for word in words if has_word(word) and not _patterns().starts_without_space(word)]
        elif has_word(letter):  # else marks without a letter
            tokens.append(letter)
    return tokens


def word_parts(tokens: list[str]) -> list[str]:
    """The tokens with a space before each except the first; joined, they are a caption."""
    return [f" {token}" if number else token for number, token in enumerate(tokens)]


def character_parts(tokens: list[str]) -> list[str]:
    """As `word_parts`, but without a space before and after a token of a script without spaces."""
    parts = []
    after_space = True  # no space is needed here
    for token in tokens:
        without_space = _patterns().starts_without_space(token) is not None
        parts.append(token if after_space or without_space else f" {token}")
        after_space = without_space
    return parts


def is_without_spaces(text: str) -> bool:
    """Whether a text has a letter of a script that is written without spaces between words."""
    return _patterns().finds_without_space(text) is not None


def clusters(text: str) -> list[str]:
    """The extended grapheme clusters of a text: what a reader takes for one character."""
    return _patterns().clusters(text)
