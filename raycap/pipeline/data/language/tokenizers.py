"""The tokenizers of `data.tokenizer`: how each splits a caption, and how it joins tokens to a text.

`expansionnet` and `spacy` are those of the reference implementations, for English captions. `unicode` and `characters`
work for any script, by Unicode's rules for text segmentation (UAX #29). Both first compose a caption (NFC), put it in
lower case, and remove invisible marks of direction. Equal texts therefore have equal tokens in every normal form, and
combining marks stay in their words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_DROPPED = frozenset(".,?!:;-'`")  # characters that `tokenize` leaves out
_TOKEN = re.compile(r"\w+|[^\w ]")
# The rules of spaCy's English tokenizer that captions need. spaCy splits contractions ("do n't", also without an
# apostrophe), the genitive ("man 's"), words at hyphens, and numbers from their units ("5 pm"). Marks inside a word or
# number ("6:30", "t.v", "at&t") and the last dot of some abbreviations ("p.m.") stay in the token.
# _SPACY_ENDINGS: (ending of a contraction without apostrophe, the words after which spaCy splits this ending).
_SPACY_ENDINGS = (
    ("nt", "ai are ca could dare did do does had has have is may might must need ought sha should was were wo would"),
    ("s", "he how she that there what when where who why"),
    ("d", "he how i it that there they we what when where who why you"),
    ("ll", "how it that there they what when where who why you"),
    ("re", "how there they what when where why you"),
    ("ve", "could how i might must should there they we what when where who why would you"),
)
_SPACY_CONTRACTED = {"cannot": ("can", "not"), "gonna": ("gon", "na"), "gotta": ("got", "ta"), "im": ("i", "m")} | {
    f"{word}{ending}": (word, ending) for ending, words in _SPACY_ENDINGS for word in words.split()
}
_SUBJECTS = "could|he|how|i|it|might|must|she|should|that|there|they|we|what|when|where|who|why|would|you"
_SPACY_SUFFIX = re.compile(rf"(\w)(?=n't\b|'s\b)|\b({_SUBJECTS})(?='(?:m|d|ll|re|ve)\b)")
_UNITS = "am|pm|[kcdm]?m|ha|yd|in|ft|[km]?g|t|lb|oz|kmh|mph|[mkgt]b"
_SPACY = re.compile(
    r"n't\b|'(?:s|m|d|ll|re|ve)\b"
    r"|(?:[ap]\.m|e\.g|i\.e|v\.s|vs|co)\.|(?<!\S)[a-z]\.(?!\S)|and/or\b"
    rf"|\d+(?:[.,]\d+)*(?=(?:{_UNITS})\b)"
    r"|\w+(?:(?:[.';&]|[,:/](?=\d)|(?<=[^\W\d])-(?=\d))\w+)*(?:[-/](?!\S))?"
    r"|\.{2,}|[^\w\s]"
)
_SPACY_DROPPED = frozenset([*"'`.?!,:-;", "..."])  # marks that the reference leaves out, unlike others such as &
# Soft hyphens, marks of direction, word joiners and byte order marks. Zero-width joiners and non-joiners are kept,
# because these two change the spelling of words, for example in Persian and Sinhala.
_INVISIBLE = re.compile("[\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
# Scripts that are written without spaces between words. Patterns match them by Unicode's property `scx`, because it
# includes characters that scripts share, such as the prolonged sound mark of Hiragana and Katakana.
_SCRIPTS = (
    "Hani", "Hira", "Kana", "Bopo", "Yiii", "Thai", "Laoo", "Khmr", "Mymr", "Tale", "Talu", "Lana", "Tavt", "Java",
    "Bali",
)  # fmt: skip
SUBWORD = "subword"


def tokenize(caption: str) -> list[str]:
    """Lower-case tokens of a raw caption, as in ExpansionNet v2's published code.

    Words are runs of letters, digits and underscores; each other character is a token, except spaces and the characters
    ``. , ? ! : ; - ' ` ``. A newline inside a caption is a token, because the published vocabulary has this word.
    """
    return [token for token in _TOKEN.findall(caption.lower().rstrip()) if token not in _DROPPED]


def tokenize_like_spacy(caption: str) -> list[str]:
    """Lower-case tokens as spaCy splits English, without common punctuation (for the Meshed-Memory Transformer).

    The rules approximate spaCy: 20 of the 202,654 captions of COCO's val2014 have other tokens in spaCy 3.8.7. White
    space is never a token, although spaCy makes a token of a double space.
    """
    pieces = _SPACY.findall(_SPACY_SUFFIX.sub(r"\1\2 ", caption.lower()))
    tokens = (token for piece in pieces for token in _SPACY_CONTRACTED.get(piece, (piece,)))
    return [token for token in tokens if token not in _SPACY_DROPPED]


class _Patterns(NamedTuple):
    """Functions of compiled patterns of the package regex.

    words, clusters: the words and the grapheme clusters of a text. runs: divides a text into pairs (letter, ""), with a
    letter of a script without spaces and its marks, and ("", others), with the text up to the next such letter.
    starts_without_space: a match if a text starts with such a letter. finds_without_space: a match if it contains one.
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
    """The pattern of a word by the rules WB4 to WB13b of UAX #29, or of a single letter. Connectors alone do not match.

    The flag WORD of the package regex is not used, because it breaks the rules if a mark precedes a colon or an
    apostrophe.
    """

    def unit(*classes: str) -> str:
        """The pattern of a character of these Word_Break classes with the marks after it, which WB4 ignores."""
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

    The narrow no-break space, which French has before punctuation, becomes a space, because Unicode's word boundaries
    would make it a part of the word.
    """
    if caption.isascii():
        return caption.lower()
    caption = caption.replace("\u202f", " ")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", _INVISIBLE.sub("", caption)).lower())


def has_word(text: str) -> bool:
    """True if a text contains a letter or a digit."""
    return any(map(str.isalnum, text))


def unicode_words(caption: str) -> list[str]:
    """The words of a caption by Unicode's default word boundaries. Segments without a letter or digit are left out.

    Marks, joiners, apostrophes and decimal points inside a word do not split it. For scripts without spaces use
    `characters`, because here each Han character, Hiragana sign or Thai letter is a word, so captions get spaces.
    """
    return [word for word in _patterns().words(normalized(caption)) if has_word(word)]


def characters(caption: str) -> list[str]:
    """The tokens of a caption: single characters of scripts without spaces, and words of all other scripts.

    In Han, Hiragana, Katakana, Thai, Lao, Khmer, Burmese and a few other scripts, each letter with its marks (an
    extended grapheme cluster and the marks after it) is a token. The text between such letters is split as
    `unicode_words` does.
    """
    tokens: list[str] = []
    for letter, others in _patterns().runs(normalized(caption)):
        if others:
            words = _patterns().words(others)
            # a mark of a script without spaces that has no letter before it is no word
            tokens += [word for word in words if has_word(word) and not _patterns().starts_without_space(word)]
        elif has_word(letter):  # marks without a letter are no token
            tokens.append(letter)
    return tokens


def word_parts(tokens: list[str]) -> list[str]:
    """The tokens, each with a space before it except the first. Joined, the results are a caption."""
    return [f" {token}" if number else token for number, token in enumerate(tokens)]


def character_parts(tokens: list[str]) -> list[str]:
    """Like `word_parts`, but without a space before or after a token of a script without spaces."""
    parts = []
    needs_space = False  # after the token before
    for token in tokens:
        has_spaces = not _patterns().starts_without_space(token)  # in the token's script
        parts.append(f" {token}" if needs_space and has_spaces else token)
        needs_space = has_spaces
    return parts


def is_without_spaces(text: str) -> bool:
    """True if a text has a letter of a script that is written without spaces between words."""
    return _patterns().finds_without_space(text) is not None


def clusters(text: str) -> list[str]:
    """The extended grapheme clusters of a text: what a reader takes for one character."""
    return _patterns().clusters(text)


@dataclass(frozen=True)
class Tokenizer:
    """How a caption is split, and how its tokens are joined.

    split: makes tokens of a caption. parts: adds the spaces to tokens, so that the joined results are a caption.
    """

    split: Callable[[str], list[str]]
    parts: Callable[[list[str]], list[str]] = word_parts


# `tokens` splits a text of the annotation file's tokens joined with spaces (the column tokens of a data set). `subword`
# splits into words here, to count and compare them. Only a vocabulary can split into pieces, by its subword model.
TOKENIZERS: dict[str, Tokenizer] = {
    "expansionnet": Tokenizer(tokenize),
    "spacy": Tokenizer(tokenize_like_spacy),
    "tokens": Tokenizer(str.split),
    "unicode": Tokenizer(unicode_words),
    "characters": Tokenizer(characters, character_parts),
    SUBWORD: Tokenizer(characters, character_parts),
}


def caption_words(tokenizer: str, caption: str) -> list[str]:
    """The words of a raw caption, to count and compare them. In place of `tokens`, `expansionnet` splits the caption.

    The tokenizer `tokens` splits only texts of tokens.
    """
    return TOKENIZERS["expansionnet" if tokenizer == "tokens" else tokenizer].split(caption)
