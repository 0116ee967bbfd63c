"""Language codes, and the words on which captions of a language are scored."""

from __future__ import annotations

import re
from typing import Literal

MetricTokenizer = Literal["PTB", "unicode", "characters"]

ENGLISH = "en"
# A primary language subtag of BCP 47 (RFC 5646, section 2.1): two or three letters of ISO 639, or a longer one.
_CODE = re.compile("[a-z]{2,8}")
# Languages whose words are not separated: Chinese, Japanese, Thai, Lao, Khmer and Burmese. Chinese has several codes.
WITHOUT_SPACES = frozenset(("zh", "cmn", "yue", "wuu", "ja", "th", "lo", "km", "my"))


def is_language(code: str) -> bool:
    """Whether a text is a well-formed language code. It need not be a registered one."""
    return _CODE.fullmatch(code) is not None


def metric_tokenizer(language: str) -> MetricTokenizer:
    """The tokenizer of the metrics: PTB for English, characters without spaces between words, else Unicode's words."""
    if language == ENGLISH:
        return "PTB"
    return "characters" if language in WITHOUT_SPACES else "unicode"


def suggested_tokenizer(language: str) -> str:
    """The value of `data.tokenizer` that fits a language."""
    return "expansionnet" if language == ENGLISH else metric_tokenizer(language)
