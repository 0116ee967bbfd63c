"""The words on which captions are scored, and what they show that metrics do not.

They depend on the captions' language, and not on the model's tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from raycap.models.config import Values
from raycap.pipeline.config.languages import ENGLISH, metric_tokenizer
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.evaluation.scores import ptb

VERSION = 1  # of the tokenizers `unicode` and `characters`; raise it when one of them gives other words
# Words that cannot end an English caption: articles, possessives, conjunctions, copulas, and prepositions that need an
# object. The list omits prepositions that often end a clause, like "on" in "the shelf it stands on".
_OPEN_ENDINGS = (
    "a an the his her its their my your our this these those some and or but while as that which who with of for at "
    "from into onto to by is are was were be being has have near beside between behind above next"
)
OPEN_ENDINGS = frozenset(_OPEN_ENDINGS.split())


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


def caption_stats(
    captions: Sequence[Sequence[str]], training_captions: Iterable[str] | None = None, language: str = ENGLISH
) -> Values:
    """Shares (0 to 1) and counts over tokenized captions.

    empty: share of captions without a word. broken_endings: share whose last word needs another word after it; None for
    other languages than English.
    doubled_words: share in which a word is followed by itself. repeated_ngrams: for each n, the share that contains an
    n-gram twice. lengths: number of captions by number of words. mean_length: in words. seen_in_training: share that
    equals one of the raw `training_captions` word for word.
    """
    total = max(len(captions), 1)
    stats: Values = {
        "empty": sum(not tokens for tokens in captions) / total,
        "broken_endings": None,
        "doubled_words": sum(any(a == b for a, b in pairwise(tokens)) for tokens in captions) / total,
        "repeated_ngrams": {str(n): sum(_repeats(tokens, n) for tokens in captions) / total for n in (2, 3, 4)},
        "lengths": {str(length): count for length, count in sorted(Counter(map(len, captions)).items())},
        "mean_length": sum(map(len, captions)) / total,
        "distinct_words": len({word for tokens in captions for word in tokens}),
    }
    if language == ENGLISH:
        open_endings = sum(bool(tokens) and tokens[-1] in OPEN_ENDINGS for tokens in captions)
        stats["broken_endings"] = open_endings / total
    if training_captions is not None:
        distinct = set(map(tuple, captions))  # of the training captions, which may be many more, one is here at a time
        seen = distinct.intersection(tuple(metric_words(caption, language)) for caption in training_captions)
        stats["seen_in_training"] = sum(tuple(tokens) in seen for tokens in captions) / total
    return stats


def _repeats(tokens: Sequence[str], order: int) -> bool:
    """Whether some n-gram of `order` words occurs twice."""
    ngrams = [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]
    return len(set(ngrams)) < len(ngrams)
