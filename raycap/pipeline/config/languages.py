"""Language codes, and which tokenizer splits the captions of a language into words."""

from __future__ import annotations

import re
from typing import Literal

MetricTokenizer = Literal["PTB", "unicode", "characters"]

ENGLISH = "en"
# Values of `data.tokenizer` whose tokens can be parts of words, so that a token may rightly follow an equal one.
PARTS_OF_WORDS = frozenset(("characters", "subword"))
# The primary language subtag of BCP 47 (RFC 5646, section 2.1): two or three letters (ISO 639), or up to eight letters.
_CODE = re.compile("[a-z]{2,8}")
# Languages that do not separate words: Chinese (zh, cmn, yue, wuu), Japanese, Thai, Lao, Khmer and Burmese.
WITHOUT_SPACES = frozenset(("zh", "cmn", "yue", "wuu", "ja", "th", "lo", "km", "my"))


# {code of three letters (ISO 639-2 or 639-3): the shorter primary code}, for the languages that this file names.
SHORTER_CODES = {
    **{"eng": ENGLISH, "zho": "zh", "chi": "zh", "jpn": "ja", "tha": "th"},
    **{"lao": "lo", "khm": "km", "mya": "my", "bur": "my"},
}


def code_problem(code: str) -> str:
    """The end of a sentence that says what is wrong with a language code. "" if its form is right."""
    if _CODE.fullmatch(code) is None:
        return "is not a language code; give the primary code of BCP 47 in lower case, such as en, de, hi or zh"
    if code in SHORTER_CODES:
        return f"is not the primary code of BCP 47; give {SHORTER_CODES[code]}"
    return ""


def metric_tokenizer(language: str) -> MetricTokenizer:
    """The metrics' tokenizer: PTB for English, characters for languages without spaces, unicode for all others."""
    if language == ENGLISH:
        return "PTB"
    return "characters" if language in WITHOUT_SPACES else "unicode"


def suggested_tokenizer(language: str) -> str:
    """The value of `data.tokenizer` that fits a language."""
    return "expansionnet" if language == ENGLISH else metric_tokenizer(language)
