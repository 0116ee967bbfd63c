"""The words on which captions are scored. They depend on the captions' language, and not on the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from raycap.pipeline.config.languages import ENGLISH, metric_tokenizer
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.evaluation.scores import ptb

VERSION = 1  # of the tokenizers `unicode` and `characters`; raise it when one of them gives other words


def metric_words(caption: str, language: str) -> list[str]:
    """The words of one raw caption."""
    return ptb.tokenize(caption) if language == ENGLISH else TOKENIZERS[metric_tokenizer(language)].split(caption)


def words_of_all(captions: Sequence[str], language: str) -> list[list[str]]:
    """The words of raw captions. PTB reads them as the lines of one file, as pycocoevalcap does."""
    if language == ENGLISH:
        return ptb.tokenize_all(captions)
    return [metric_words(caption, language) for caption in captions]


def words_signature(language: str) -> str:
    """The part of a score's signature that names the tokenizer and, except for English, the language."""
    if language == ENGLISH:
        return f"tok:{ptb.SIGNATURE}"
    return f"tok:{metric_tokenizer(language)}-{VERSION}|lang:{language}"
