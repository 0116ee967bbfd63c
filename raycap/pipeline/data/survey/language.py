"""The script of captions, a guess of their language, and the tokenizer that suits it."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Scripts, by the first word of their characters' names in Unicode, that one language uses, or one most of all.
SCRIPT_LANGUAGES = {
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th", "CYRILLIC": "ru", "ARABIC": "ar",
    "DEVANAGARI": "hi", "BENGALI": "bn", "GREEK": "el", "HEBREW": "he", "TAMIL": "ta",
}  # fmt: skip
# Frequent words of captions in languages with Latin letters, by which one is guessed.
WORDS = {
    "en": "a the of with is on and are in at to an his her two",
    "de": "ein eine einem einer der die das und mit ist auf im sind von zwei",
    "fr": "un une le la les des du avec est sur et dans au deux qui",
    "es": "un una el la los las con del es en y sobre está al dos",
    "it": "un una il lo la gli con di è su e nel della sono due",
    "pt": "um uma o a os as com do da em é e no na dois",
    "nl": "een de het met van op en is in bij die twee zijn aan",
    "vi": "một con người đang trên của và có là những cái các đứng ngồi với",
    "tr": "bir ve ile üzerinde olan bu için iki adam da de kadın çocuk var yanında",
    "pl": "w na z i do jest się po dwa przed obok mężczyzna kobieta osoba dwóch",
}
WITHOUT_BLANKS = ("ja", "zh", "th")  # languages whose words are not divided by blanks
MIN_SHARE = 0.1  # of the letters that are Japanese syllables, which no Chinese text has
MIN_FREQUENT = 0.1  # of all words that are frequent words of the language
MIN_MARGIN, MIN_WORDS = 1.25, 2  # times the second language's frequent words; different frequent words
PLAIN_TOKENIZER = "expansionnet"


@dataclass(frozen=True)
class Language:
    """The script of captions (Unicode's name), a language (ISO 639-1; None: not recognized) and a tokenizer."""

    script: str
    code: str | None
    tokenizer: str
    comment: str  # why this tokenizer; "" if it suits the language


def detect_language(captions: Iterable[str], tokenizers: Collection[str]) -> Language:
    """The language of captions, and a tokenizer of those that the configuration knows (`data.tokenizer`)."""
    letters: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for caption in captions:
        letters.update(filter(str.isalpha, caption))
        words.update(caption.lower().split())
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        scripts[unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]] += count
    script = scripts.most_common(1)[0][0] if scripts else "UNKNOWN"
    syllables = scripts["HIRAGANA"] + scripts["KATAKANA"]
    if syllables > MIN_SHARE * scripts.total():
        script = "HIRAGANA"
    code = _latin_language(words) if script == "LATIN" else SCRIPT_LANGUAGES.get(script)
    wanted = "characters" if code in WITHOUT_BLANKS else PLAIN_TOKENIZER if code == "en" else "unicode"
    if wanted in tokenizers:
        return Language(script, code, wanted, "")
    comment = "its rules are for English; look at the words that `raycap check` counts"
    return Language(script, code, PLAIN_TOKENIZER, comment)


def _latin_language(words: Counter[str]) -> str | None:
    """The language whose frequent words are most of the words; None if they are too few, or nearly as many of another.

    A language that is not in WORDS shares some words with one that is: Swedish has "en", as Spanish.
    """
    found = {code: [word for word in frequent.split() if words[word]] for code, frequent in WORDS.items()}
    counts = {code: sum(words[word] for word in each) for code, each in found.items()}
    best, second = sorted(counts, key=counts.__getitem__, reverse=True)[:2]
    is_clear = counts[best] >= MIN_MARGIN * counts[second] and len(found[best]) >= MIN_WORDS
    return best if is_clear and counts[best] >= MIN_FREQUENT * words.total() > 0 else None
