"""Tokenization of captions, and the vocabulary: words to ids and back."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.untrusted.documents import parse_json
from pipeline.untrusted.files import read_regular_file
from pipeline.untrusted.names import quoted

MAX_BYTES = 2**24  # of a file; the published vocabulary of 10,000 words has 0.14 MB
PAD, SOS, EOS, UNK = "PAD", "SOS", "EOS", "UNK"
SPECIALS = (PAD, SOS, EOS, UNK)

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


# `tokens` are the words of the annotation file as they are, which `Dataset` holds joined with spaces.
TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "expansionnet": tokenize,
    "spacy": tokenize_like_spacy,
    "tokens": str.split,
}


def text_column(tokenizer: str | None) -> str:
    """The column of a data set that a tokenizer of `TOKENIZERS` splits; without one that of the raw captions."""
    return "tokens" if tokenizer == "tokens" else "captions"


@dataclass(frozen=True)
class Vocabulary:
    """The words, whose positions are their ids, and the name of their tokenizer. PAD, SOS, EOS and UNK are words.

    Raises ValueError when a special is missing, a word occurs twice, or the tokenizer is unknown.
    """

    words: tuple[str, ...]
    tokenizer: str = "expansionnet"
    ids: dict[str, int] = field(init=False, repr=False, compare=False)
    pad: int = field(init=False, repr=False, compare=False)
    sos: int = field(init=False, repr=False, compare=False)
    eos: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: index for index, word in enumerate(self.words)}
        if len(ids) != len(self.words):
            repeated = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"the vocabulary holds {quoted(repeated[0])} more than once; every word must occur once")
        if self.tokenizer not in TOKENIZERS:
            raise ValueError(f"the vocabulary's tokenizer is {quoted(self.tokenizer)}; known: {', '.join(TOKENIZERS)}")
        if missing := [special for special in SPECIALS if special not in ids]:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}; it must hold {', '.join(SPECIALS)}")
        for name, value in {"ids": ids, "pad": ids[PAD], "sos": ids[SOS], "eos": ids[EOS]}.items():
            object.__setattr__(self, name, value)  # the class is frozen

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], min_count: int, tokenizer: str = "expansionnet") -> Vocabulary:
        """The words that captions use `min_count` times or more, and the special tokens.

        Words are sorted by code point, as in the published code. Raises ValueError when no word remains.
        """
        counts = Counter(itertools.chain.from_iterable(captions))
        words = {word for word, count in counts.items() if count >= min_count}
        if not words:
            problem = f"none of the {len(counts)} distinct words of the training captions is used data.min_count"
            raise ValueError(f"the vocabulary is empty: {problem} = {min_count} times or more; lower data.min_count")
        return cls(tuple(sorted(words | set(SPECIALS))), tokenizer)

    def tokenize(self, caption: str) -> list[str]:
        """Tokens of a raw caption, by this vocabulary's tokenizer."""
        return TOKENIZERS[self.tokenizer](caption)

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """The ids of SOS, the tokens and EOS. A token outside of the vocabulary gets the id of UNK."""
        return [self.sos, *(self.ids.get(token, self.ids[UNK]) for token in tokens), self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """The caption's text up to the first EOS, without PAD and SOS."""
        caption = itertools.takewhile(lambda index: index != self.eos, ids)
        return " ".join(self.words[index] for index in caption if index not in (self.sos, self.pad))

    def to_json(self) -> str:
        """The text of vocabulary.json, which `load` reads."""
        return json.dumps({"tokenizer": self.tokenizer, "words": self.words}, ensure_ascii=False, indent=0)

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """The vocabulary in a file that `save` wrote. Raises ValueError for other content, OSError without a file."""
        data = parse_json(read_regular_file(path, MAX_BYTES), str(path))
        words = data.get("words") if isinstance(data, dict) else None
        tokenizer = data.get("tokenizer", "expansionnet") if isinstance(data, dict) else None
        if not isinstance(words, list) or not all(isinstance(text, str) for text in (tokenizer, *words)):
            raise ValueError(f"{path} is not a vocabulary: expected a JSON object with a list of text under 'words'")
        return cls(tuple(words), str(tokenizer))
