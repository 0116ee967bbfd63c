"""The tokenizers of `data.tokenizer`: how each splits a caption, and how it joins tokens to a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raycap.pipeline.data.language.english import tokenize, tokenize_like_spacy
from raycap.pipeline.data.language.words import character_parts, characters, unicode_words, word_parts

SUBWORD = "subword"


@dataclass(frozen=True)
class Tokenizer:
    """How a caption is split, and how its tokens are joined.

    parts: the text of each token with the space before it, if there is one.
    """

    split: Callable[[str], list[str]]
    parts: Callable[[list[str]], list[str]] = word_parts


# `tokens` are the words of the annotation file as they are, which `Dataset` holds joined with spaces. `subword` is here
# for what counts and compares words; the pieces of a caption depend on the vocabulary's model (`subwords.py`).
TOKENIZERS: dict[str, Tokenizer] = {
    "expansionnet": Tokenizer(tokenize),
    "spacy": Tokenizer(tokenize_like_spacy),
    "tokens": Tokenizer(str.split),
    "unicode": Tokenizer(unicode_words),
    "characters": Tokenizer(characters, character_parts),
    SUBWORD: Tokenizer(characters, character_parts),
}


def text_column(tokenizer: str | None) -> str:
    """The column of a data set that a tokenizer of `TOKENIZERS` splits; without one that of the raw captions."""
    return "tokens" if tokenizer == "tokens" else "captions"


def caption_words(tokenizer: str, caption: str) -> list[str]:
    """The words of a raw caption, to count and compare them. `tokens` splits a raw caption as `expansionnet`."""
    return TOKENIZERS["expansionnet" if tokenizer == "tokens" else tokenizer].split(caption)
