"""Language codes, and the words on which captions of a language are scored."""

from __future__ import annotations

import re
from typing import Literal

MetricTokenizer = Literal["PTB", "unicode", "characters"]

ENGLISH = "en"
# Values of `data.tokenizer` whose tokens can be parts of words. Equal neighbors are then no mistake of the model.
PARTS_OF_WORDS = frozenset(("characters", "subword"))
# A primary language subtag of BCP 47 (RFC 5646, section 2.1): two or three letters of ISO 639, or a longer one.
_CODE = re.compile("[a-z]{2,8}")
# Languages whose words are not separated: Chinese, Japanese, Thai, Lao, Khmer and Burmese. Chinese has several codes.
WITHOUT_SPACES = frozenset(("zh", "cmn", "yue", "wuu", "ja", "th", "lo", "km", "my"))


# Codes of three letters (ISO 639-2 and 639-3) of the languages that this file knows by their shorter code
SHORTER_CODES = {
    **{"eng": ENGLISH, "zho": "zh", "chi": "zh", "jpn": "ja", "tha": "th"},
    **{"lao": "lo", "khm": "km", "mya": "my", "bur": "my"},
}


def code_problem(code: str) -> str:
    """What is wrong with a language code, as the end of a sentence; "" for a code in the right form."""
    if _CODE.fullmatch(code) is None:
        return "is not a language code; give the primary code of BCP 47 in lower case, such as en, de, hi or zh"
    if code in SHORTER_CODES:
        return f"is not the primary code of BCP 47; give {SHORTER_CODES[code]}"
    return ""


def metric_tokenizer(language: str) -> MetricTokenizer:
    """The tokenizer of the metrics: PTB for English, characters for languages without spaces, else Unicode's words."""
    if language == ENGLISH:
        return "PTB"
    return "characters" if language in WITHOUT_SPACES else "unicode"


def suggested_tokenizer(language: str) -> str:
    """The value of `data.tokenizer` that fits a language."""
    return "expansionnet" if language == ENGLISH else metric_tokenizer(language)
