"""The tokenizers of the reference implementations, for English captions."""

from __future__ import annotations

import re

_DROPPED = frozenset(".,?!:;-'`")  # tokens that `tokenize` leaves out
_TOKEN = re.compile(r"\w+|[^\w ]")


def tokenize(caption: str) -> list[str]:
    """Lower-case tokens of a raw caption, as in ExpansionNet v2's published code.

    Words are runs of letters, digits and underscores; each other character is a token, except spaces and the characters
    ``. , ? ! : ; - ' ` ``. A newline inside a caption is a token, because the published vocabulary has this word.
    """
    return [token for token in _TOKEN.findall(caption.lower().rstrip()) if token not in _DROPPED]


# The rules of spaCy's English tokenizer that captions need. It splits contractions ("do n't", also without apostrophe),
# the genitive ("man 's"), words at hyphens and numbers from their units ("5 pm"). A mark inside a word or a number does
# not split it ("6:30", "t.v", "at&t"), nor does it end one of its abbreviations ("p.m.").
_SPACY_ENDINGS = (  # of contractions, and the words before them, for which spaCy needs no apostrophe
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
_SPACY_DROPPED = frozenset([*"'`.?!,:-;", "..."])  # marks that the reference leaves out; it keeps others, such as &


def tokenize_like_spacy(caption: str) -> list[str]:
    """Lower-case tokens as spaCy splits English, without common punctuation (for the Meshed-Memory Transformer).

    The rules approximate spaCy: 20 of the 202,654 captions of COCO's val2014 have other tokens in spaCy 3.8.7. White
    space is never a token; spaCy makes one of two spaces.
    """
    pieces = _SPACY.findall(_SPACY_SUFFIX.sub(r"\1\2 ", caption.lower()))
    tokens = (token for piece in pieces for token in _SPACY_CONTRACTED.get(piece, (piece,)))
    return [token for token in tokens if token not in _SPACY_DROPPED]
