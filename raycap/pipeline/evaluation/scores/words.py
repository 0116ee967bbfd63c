"""Splits captions into the words on which metrics are computed, and computes further statistics of these words.

English captions are split as by pycocoevalcap's PTBTokenizer, and other captions by the tokenizer of their language.
The model's tokenizer is not used, so that scores of models with different tokenizers can be compared.

pycocoevalcap 1.2 runs Stanford CoreNLP 3.4.1 (`PTBTokenizer -preserveLines -lowerCase`) over all captions, one per
line, and drops the tokens in `PUNCTUATION`. The rules here were derived from that program's output, not from its source
code, and tests compare both outputs. At each position the tokenizer takes the longest match of all rules, or the first
rule among equally long matches. A rule may look ahead: its second pattern then matches the text after the token. The
text after the token counts in the length of the match, but is tokenized afterwards. A plain piece between spaces (a
word, possibly with a comma, a full stop or 's) needs no rule.

Every character of the Basic Multilingual Plane gives the same words as in pycocoevalcap in each of the tests' contexts,
except for letters that only newer Unicode versions lower. A line separator (U+000B, U+000C, U+000D, U+2028, U+2029)
inside a caption is a space here, and shifts all later captions in pycocoevalcap. Letters after a tag may differ.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

from raycap.models.config import Values
from raycap.pipeline.config.languages import ENGLISH, metric_tokenizer
from raycap.pipeline.data.language.tokenizers import TOKENIZERS

SIGNATURE = "stanford-ptb-3.4.1-no-punctuation"
VERSION = 1  # of the tokenizers `unicode` and `characters`, raised if one of them is changed to give other words
# Words that cannot end an English caption: articles, possessives, conjunctions, copulas, and prepositions that need an
# object. Prepositions that often end a clause, like "on" in "the shelf it stands on", are not in the list.
_OPEN_ENDINGS = (
    "a an the his her its their my your our this these those some and or but while as that which who with of for at "
    "from into onto to by is are was were be being has have near beside between behind above next"
)
OPEN_ENDINGS = frozenset(_OPEN_ENDINGS.split())

# Source: pycocoevalcap/tokenizer/ptbtokenizer.py. Tokens have lower case, so no token equals "-LRB-", and brackets
# remain in captions as "-lrb-".
_PUNCTUATION = "'' ' `` ` -LRB- -RRB- -LCB- -RCB- . ? ! , : - -- ... ;"
PUNCTUATION = frozenset(_PUNCTUATION.split())

# Abbreviations in upper or lower case whose full stop is a part of the token, and which may also end a sentence
_CLOSING_ABBREVIATIONS = (
    "al ala apr aug bhd blvd bros co corp cos ct dak dec esq est etc ext feb fla fri ga inc ind jan jr jul jun kan ky "
    "ltd mar md mo mon mont neb nev nov oct penn plc rd rt sep seq sq sr sys tel tenn thu tue va vt wed wis wyo"
)
# Abbreviations of the same kind that never end a sentence
_ABBREVIATIONS = (
    "adj adm adv ave cf cie col cpl dept det dr drs ens ft gen gov hon jos lt maj messrs mme mr mrs ms mt pfc ph pres "
    "prof pvt rep rev sen sfc sgt spc st ste vs wm"
)
_CAPITALIZED_ABBREVIATIONS = "ark az del ill la mass miss ore pa tex wash"  # only with a capital first letter
_CLOSING_NOT_UPPER, _NOT_UPPER = "pte pty", "mfg mtg"  # unless the whole word is in capitals
_NUMBER_ABBREVIATIONS = "art ca fig figs no nos op pp prop"  # only before a number
# A single letter with a full stop is one token ("K."), unless one of these words follows, which starts a new sentence.
_SENTENCE_STARTS = (
    "a about according additionally after an as at but earlier he her here however if in it last many more now once "
    "one other our she since so some such that the their then there these they this we what when while yet you"
)
_FILE_EXTENSIONS = (
    "bat bmp c class cgi cpp dll doc docx exe gif gz h htm html jar java jpeg jpg mov mp3 pdf php pl png ppt ps py sql "
    "tar txt wav x xml zip"
)
_TWO_WORDS = "cannot gonna gotta wanna lemme gimme"


def _any_case(words: str) -> str:
    """A pattern that matches any of the words, in upper or lower case."""
    return f"(?i:{'|'.join(sorted(words.split(), key=len, reverse=True))})"


def _capitalized(words: str) -> str:
    """A pattern that matches any of the words with a capital first letter."""
    return f"(?=[A-Z]){_any_case(words)}"


def _not_upper(words: str) -> str:
    """A pattern that matches any of the words in lower case, with or without a capital first letter."""
    return "(?:" + "|".join(f"[{word[0]}{word[0].upper()}]{word[1:]}" for word in words.split()) + ")"


_APOSTROPHE = "(?:['’\u0092]|&apos;)"
_ANY_QUOTE = "['’‘‛`\u0091\u0092]"
# `_stand_ins` exchanges the characters beyond ASCII for these. The rules then read a stand-in for its whole class.
_WORD_LETTER, _MARK, _WORD_DIGIT, _SYMBOL = "ª", "\u0300", "\u0660", "©"
_UNKNOWN, _WIDE_SPACE, _NARROW_SPACE, _HYPHEN, _SEPARATOR = "\x01\u2003\u202f‐٫"  # dropped outside of words
_SPACES = " \t\n"
_DIGIT = f"[0-9{_WORD_DIGIT}]"
_LETTER = f"[A-Za-z{_WORD_LETTER}\u00ad]"
_ALNUM = f"[A-Za-z{_WORD_LETTER}0-9{_WORD_DIGIT}]"
_SOFT_ALNUM = f"[A-Za-z{_WORD_LETTER}0-9{_WORD_DIGIT}\u00ad]"
_MARKED_LETTER = f"[A-Za-z{_WORD_LETTER}{_MARK}\u00ad]"
_MARKED_WORD = f"{_MARKED_LETTER}[A-Za-z{_WORD_LETTER}{_MARK}\u00ad0-9{_WORD_DIGIT}]*"
_CURLY_QUOTES = "“”«»‘’‹›„‚‛‟\u0091-\u0094"
_ELIDED = f"(?:[dDoOlL]{_ANY_QUOTE}{_ALNUM})?"  # the start of a word such as d'or or O'Neill
_ACRONYM = r"[A-Za-z](?:\.[A-Za-z])+"
_HYPHENATED = "[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}"
_COMPANY = "[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+"
_HOST = rf"[^{_SPACES}\u00a0\"<>|(){{}}.]+"  # one part of the domain of an e-mail address
_LABEL = rf"[^{_SPACES}\"<>|.!?(){{}},\-/_=$'@:;0-9\\^`\[\]]+"  # one part of a domain name
_LOCAL_NUMBER = rf"{_DIGIT}{{3,4}}[- \u00a0]?{_DIGIT}{{3,5}}"  # a telephone number without its area code
_EYE = "[-^x=~<>']"  # of a face such as ^_^

# The rules of the PTB tokenizer: (pattern of the token, pattern of the text after the token)
_RULES: tuple[tuple[str, str], ...] = (
    # Two words written as one
    ("(?i:can)", "(?i:not)"),
    ("(?i:gon|wan)", "(?i:na)"),
    ("(?i:got)", "(?i:ta)"),
    ("(?i:lem|gim)", "(?i:me)"),
    ("(?i:more)", f"{_APOSTROPHE}n"),
    (f"{_APOSTROPHE}[tT]", "(?i:is|was)"),
    # Tags, addresses, names
    (r"<[A-Za-z][A-Za-z0-9_:.-]*(?: +[A-Za-z][A-Za-z0-9_:.-]*(?:=\"[^\"<>\n]*\")?)* */?>", ""),
    (r"</[A-Za-z][A-Za-z0-9_:.-]* *>|<[!?][A-Za-z-][^<>\n]*>", ""),
    (r"&(?:lt|gt|amp|quot|apos|nbsp|mdash|#[0-9]+);", ""),
    (rf"https?://[^{_SPACES}<>\"|(){{}}]+[^{_SPACES}<>\"|.!?(),{{}}-]", ""),
    (rf"(?i:www)\.(?:[^{_SPACES}\"<>|.!?(){{}},]+\.)+[A-Za-z]{{2,4}}", ""),
    (rf"(?:{_LABEL}\.)+(?:com|net|org|edu)(?:/[^{_SPACES}\"<>|(){{}}]*[^{_SPACES}\"<>|.!?(){{}},-])?", ""),
    (rf"<?[A-Za-z0-9][^{_SPACES}\u00a0\"<>|(){{}}]*@{_HOST}(?:\.{_HOST})*>?", ""),
    (rf"@[A-Za-z_][A-Za-z_0-9]*|#{_MARKED_LETTER}+", ""),
    # Contractions
    ("[A-Za-z]*[A-MO-Za-mo-z]", f"[nN]{_ANY_QUOTE}[tT]"),
    (f"[nN]{_ANY_QUOTE}[tT]", ""),
    (f"{_APOSTROPHE}(?i:[msd]|ll|re|ve)", "[^A-Za-z]"),
    ("[’\u0092](?i:[msd]|ll|re|ve)", ""),
    ("[A-Za-z]+", f"{_APOSTROPHE}(?i:[msd]|ll|re|ve)"),
    (f"[yY]{_APOSTROPHE}", "[A-Za-z]"),
    # Words that contain an apostrophe
    (f"{_APOSTROPHE}[nN]{_APOSTROPHE}?|[lLdDjJ]{_APOSTROPHE}|(?i:dunkin|somethin|ol){_APOSTROPHE}", ""),
    (f"{_APOSTROPHE}(?:(?i:em|till?|cause)|[2-9]0s)", ""),
    (r"(?i:c'mon|e'er|s'mores|nor'easter|ev'ry|li'l|nat'l|cont'd\.?)", ""),
    (f"[A-HJ-XZn]{_ANY_QUOTE}{_LETTER}{{2,}}|[oO]{_ANY_QUOTE}[oO]", ""),
    (f"{_APOSTROPHE}[0-9]{{2}}", r"\s"),
    (f"{_LETTER}+[aeiouyAEIOUY]{_ANY_QUOTE}[aeiouA-Z]{_LETTER}*", ""),
    # Words
    (f"{_ELIDED}{_ALNUM}+(?:[-_{_HYPHEN}]{_ELIDED}{_ALNUM}+)*", ""),
    (f"{_SOFT_ALNUM}+(?:[-{_HYPHEN}]{_SOFT_ALNUM}+)*", ""),
    (rf"[A-Za-z0-9][A-Za-z0-9.,]*(?:-(?:{_ACRONYM}\.|[A-Za-z0-9]+))+", ""),
    (rf"{_HYPHENATED}(?:\\?/{_HYPHENATED}){{1,2}}", ""),
    (_COMPANY, ""),
    (f"{_MARKED_WORD}(?:[.!?]{_MARKED_WORD})*", ""),
    (r"[Cc]\+\+|[CcFf]#", ""),
    # Numbers
    (rf"[-+]?(?:{_DIGIT}*(?:[.:,\u00ad{_SEPARATOR}]{_DIGIT}+)+|{_DIGIT}+)", ""),
    (rf"{_DIGIT}{{1,2}}[-/]{_DIGIT}{{1,2}}[-/]{_DIGIT}{{2,4}}", ""),
    (rf"(?:{_DIGIT}{{1,4}}[- \u00a0])?{_DIGIT}{{1,4}}(?:\\?/|⁄){_DIGIT}{{1,4}}", ""),
    (rf"(?:\({_DIGIT}{{2,3}}\)[ \u00a0]?|\+{{0,2}}{_DIGIT}{{2,4}}[- \u00a0]){_LOCAL_NUMBER}", ""),
    # Abbreviations
    (rf"(?:{_any_case(_ABBREVIATIONS)}|{_not_upper(_NOT_UPPER)})\.", ""),
    (rf"(?:{_any_case(_CLOSING_ABBREVIATIONS)}|{_not_upper(_CLOSING_NOT_UPPER)})\.", r"[\s\S]{0,2}"),
    (rf"{_capitalized(_CAPITALIZED_ABBREVIATIONS)}\.", r"[\s\S]{0,2}"),
    (rf"{_any_case(_NUMBER_ABBREVIATIONS)}\.", f"[{_SPACES}\u00a0{_WIDE_SPACE}]?{_DIGIT}"),
    (rf"{_ACRONYM}\.?", ""),
    (rf"{_ALNUM}+\.{_any_case(_FILE_EXTENSIONS)}", r"[\s.?!,]"),
    ("[A-Za-z]", rf"\.\s+{_capitalized(_SENTENCE_STARTS)}\s"),
    (r"[A-Za-z]\.", ""),
    (rf"(?:{_COMPANY}|{_ALNUM}+(?:[-_]{_ALNUM}+)*|{_MARKED_WORD}(?:[.!?]{_MARKED_WORD})*)\.", "[,;:、]"),
    # Faces
    (r"[<>]?[:;=][-o*']?[()DPdpO\\{@|\[\]]", "[^A-Za-z0-9]"),
    (rf"{_EYE}_{_EYE}|\({_EYE}[_.]?{_EYE}\)", ""),
    # Punctuation
    ("'", "[A-Za-z][^ \t\n\r\u00a0]"),
    (r"[A-Z]*\$", ""),
    (r"\.(?: ?\.){2,}", ""),
    (r"--?-?-?|-{5,}", ""),
    (r"[!?]+|''|``|_+|\*+|#+|@+|<<|>>", ""),
    (f"[{_CURLY_QUOTES}`]{{2}}|[²³¹⁰⁴-⁹]+|[₀-₉]+", ""),
    (r"[\s\S]", ""),
)

# {stand-in: hexadecimal ranges of characters} where the class in the tokenizer, which knows Unicode 6.1, is not that of
# `_CATEGORIES`. The ranges were derived from the program's output for all characters of the Basic Multilingual Plane.
_RANGES = {
    _WORD_LETTER: "1885-1886",
    _MARK: (
        "2c2-2c5 2d2-2df 2e5-2eb 2ed 2ef-2ff 375 378-379 384-385 3f6 55a-55f 6dd-6de 6e9 6fd-6fe 70f 74b-74c a43-a4f "
        "ac6-acf c45-c54"
    ),
    _SYMBOL: "80 600-603 614 2427-2b96",
    _HYPHEN: "58a 2010-2011",
    _SEPARATOR: "66b-66c",
    _WIDE_SPACE: "85",
    _NARROW_SPACE: "1c-1f 1680 202f 205f",
    " ": "a-d 2028-2029",  # the line separators
    _UNKNOWN: (
        "0-8 e-1b 7f 37f 482 528-52f 560 588 58d-58f 5ef 60d-613 61d 65f 7f9 7fd-7ff 816-819 81b-823 825-827 829-83e "
        "859-89f 8a1 8ad-8ff 93a-93b 94f 956-957 970 978 980 9f2-9fe a51 a70-a71 a75-a76 ae2-ae3 af0-b03 b3c b3e-b57 "
        "b62-b63 b70 b72-b77 bd7 bf0-c00 c04 c34 c3c c5a-c5d c62-c63 c77-c84 cbc cbe-cdd ce2-ce3 cf3-d04 d3b-d3c "
        "d4a-d4d d4f-d5f d62-d63 d70-d79 d81-d83 dca-df4 e5a-e5b e86 e89 e8c e8e-e93 e98 ea0 ea8-ea9 eac ece f01-f1f "
        "f2a-f3f f71-f87 f8d-fda 102b-103e 104a-104f 1056-1059 105e-1060 1062-1064 1067-106d 1071-1074 1082-108d 108f "
        "109a-109f 10fb 135d-137c 1390-1399 13f5-1400 166d-166e 169b-169c 16eb-16f8 170d 1712-171f 1732-1736 "
        "1752-1753 1772-1773 17b4-17d6 17d8-17db 17dd 17f0-180f 1878 18a9 191d-1945 19b0-19c0 19c8-19c9 19da-19ff "
        "1a17-1a1f 1a55-1a7f 1aa0-1aa6 1aa8-1b04 1b34-1b44 1b4c 1b5a-1b82 1ba1-1bad 1be6-1bff 1c24-1c3f 1c7e-1ce8 "
        "1ced 1cf2-1cf4 1cf7-1cfa 1dc0-1dff 1fbf-1fc1 1fcd-1fcf 1fdd-1fdf 1fed-1fef 1ffd-1ffe 2012-2015 2024-2027 "
        "203c-203d 2043-205e 20a1-20a3 20a5-20ab 20ad-20f0 2150-2152 215f-2182 2185-218b 2c2f 2c5f 2ce5-2cea "
        "2cef-2cf1 2cf9-2cff 2d70-2d7f 2de0-2e2e 2e30-2ffb 3003-3004 3007-3011 3013-3030 3036-303a 303d-303f "
        "3099-309c 30a0 312e-312f 3190-319f 31bb-31e3 3200-33ff 4db6-4dff 9fcd-9fff a490-a4c6 a4fe-a4ff a60d-a60f "
        "a66f-a67e a698-a69f a6e6-a716 a720-a721 a789-a78a a78f a794-a79f a7ab-a7f7 a802 a806 a80b a823-a839 "
        "a874-a881 a8b4-a8cf a8e0-a8f1 a8f8-a8fa a8fc-a8ff a926-a92f a947-a95f a980-a983 a9b3-a9cd a9de-a9fe "
        "aa29-aa36 aa43 aa4c-aa4d aa5c-aa5f aa77-aa79 aa7b-aa7f aab0 aab2-aab4 aab7-aab8 aabe-aabf aac1 aade-aadf "
        "aaeb-aaf1 aaf5-aaf6 ab30-abbf abe3-abed fb1e fb29 fbb2-fbd2 fd3e-fd4f fd90-fd91 fdc8-fdcf fdfc-fe6b "
        "ffe2-ffe4 ffe8-fffd"
    ),
}
_CATEGORIES = (
    dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo", "Nl"), _WORD_LETTER)
    | dict.fromkeys(("Mn", "Mc"), _MARK)
    | dict.fromkeys(("Sm", "Sc", "Sk", "So", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"), _SYMBOL)
    | {"Nd": _WORD_DIGIT, "Zs": _WIDE_SPACE}
)
_NAMED = "\u00a0\u00ad⁄、²³¹⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉“”«»‘’‹›„‚‛‟\u0091\u0092\u0093\u0094"  # by rules, so without a stand-in


@cache
def _stand_ins() -> dict[int, str]:
    """{character: what the rules read in its place}."""
    table = {code: _CATEGORIES.get(unicodedata.category(chr(code)), _UNKNOWN) for code in range(0x80, 0x10000)}
    for stand_in, ranges in _RANGES.items():
        for first, _, last in (item.partition("-") for item in ranges.split()):
            table |= dict.fromkeys(range(int(first, 16), int(last or first, 16) + 1), stand_in)
    return table | {ord(character): character for character in _NAMED}


# {token: form in which the PTB tokenizer prints it}. `tokenize` drops tokens whose printed form is punctuation.
_PRINT_FORMS = (
    dict.fromkeys("“«\u0093", "``")
    | dict.fromkeys('”»\u0094"', "''")
    | dict.fromkeys("‘‹‛\u0091", "`")
    | dict.fromkeys("’›\u0092", "'")
    | dict.fromkeys("€₠¤\u0080", "$")
    | {"£": "#", "¢": "cents", "½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
    | {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": "''", "&apos;": "'", "&nbsp;": "", "&mdash;": "--"}
    | {"\u00ad": "", "---": "--", "----": "--"}
    | {"(": "-lrb-", ")": "-rrb-", "{": "-lcb-", "}": "-rcb-", "[": "-lsb-", "]": "-rsb-"}
)
# Tokens of which the PTB tokenizer prints curly quotes as plain ones: nested quotes and contractions
_PLAIN_QUOTES = re.compile(f"[{_CURLY_QUOTES}`]{{2}}|[’\u0092](?i:[msd]|ll|re|ve)|[nN]{_ANY_QUOTE}[tT]")
_DROPPED = PUNCTUATION | {"", "\u00a0", _UNKNOWN, _WIDE_SPACE, _NARROW_SPACE, _HYPHEN, _SEPARATOR}
_PIECE = re.compile(f"[^{_SPACES}]+")


@cache
def _rules() -> tuple[re.Pattern[str], ...]:
    """The compiled rules. Group 1 of a match is the token, and the rest of the match is the look-ahead."""
    return tuple(re.compile(f"({main})(?:{ahead})") for main, ahead in _RULES)


@cache
def _plain() -> re.Pattern[str]:
    """The pattern of a plain piece: a word, possibly with a comma, full stop or 's. Its tokens need no context."""
    any_letters = f"{_CLOSING_ABBREVIATIONS} {_ABBREVIATIONS} {_NUMBER_ABBREVIATIONS}"
    some_letters = f"{_CAPITALIZED_ABBREVIATIONS} {_CLOSING_NOT_UPPER} {_NOT_UPPER}"
    not_special = rf"(?!{_any_case(_TWO_WORDS)}(?![a-zA-Z])|{_any_case(f'{any_letters} {some_letters}')}\.)"
    word = r"([A-Za-z]+|[A-Za-z]{2,}(?:-[A-Za-z]{2,})*)"
    return re.compile(rf"{not_special}{word}(?:,|(?<=..)\.|(?<=[A-Za-z]{{2}})('s))?")


@lru_cache(maxsize=1 << 17)
def _plain_tokens(piece: str) -> tuple[str, ...] | None:
    """The tokens of a plain piece, or None if the piece needs the rules."""
    if piece in (".", ","):
        return ()
    match = _plain().fullmatch(piece)
    if match is None:
        return None
    word, possessive = match[1].lower(), match[2]
    return (word, possessive) if possessive else (word,)


def tokenize(caption: str, following: str = "") -> list[str]:
    """The lower-case tokens of a caption, without punctuation. A line break counts as a space.

    following: the caption on the next line, because rules may look ahead to it. For example, the last token of "a
    letter K." is "k.", unless the next line starts with a word of `_SENTENCE_STARTS`, such as "A" or "The".
    """
    tokens: list[str] = []
    for plain in map(_plain_tokens, caption.split()):
        if plain is None:  # the piece needs rules, which read the whole line
            return _apply_rules(caption, following)
        tokens += plain
    return tokens


def tokenize_all(captions: Sequence[str]) -> list[list[str]]:
    """The tokens of each caption. As in pycocoevalcap, the captions are read as the lines of one file."""
    return [tokenize(caption, following) for caption, following in zip(captions, [*captions[1:], ""], strict=True)]


def _apply_rules(caption: str, following: str) -> list[str]:
    """The tokens of a caption of which at least one piece needs the rules. following: see `tokenize`."""
    text = caption.translate(_stand_ins()) + "\n" + following.translate(_stand_ins())
    tokens: list[str] = []
    position = 0
    while position < len(caption):
        if text[position] in _SPACES:
            position += 1
            continue
        is_start = position == 0 or text[position - 1] in _SPACES
        piece = _PIECE.match(text, position) if is_start else None
        plain = _plain_tokens(piece[0]) if piece else None
        if piece and plain is not None:
            tokens += plain
            position = piece.end()
            continue
        matches = [match for pattern in _rules() if (match := pattern.match(text, position))]
        token = max(matches, key=re.Match.end)[1]  # `max` takes the first of equally long matches
        printed = _print_form(caption[position : position + len(token)])
        position += len(token)
        if token < "\U00010000" and token not in _DROPPED and printed not in _DROPPED:  # no emoji
            tokens.append(printed)
    return tokens


def _print_form(token: str) -> str:
    """The form in which the tokenizer prints a token: lower case, Treebank brackets, plain apostrophes."""
    if token in _PRINT_FORMS:
        return _PRINT_FORMS[token]
    token = token.replace("&apos;", "'").replace("&amp;", "&")
    if token[0] == "." and not token.strip(". "):
        return "..." if len(token) > 2 else token
    if _PLAIN_QUOTES.fullmatch(token):
        return "".join(_PRINT_FORMS.get(character, character) for character in token).lower()
    if len(token) > 1:  # PTB prints brackets inside a token in Treebank form, and spaces as no-break spaces
        token = token.replace("(", "-lrb-").replace(")", "-rrb-").replace(" ", "\u00a0")
    if "\u00ad" in token and not re.search("[#@]|//", token):  # PTB prints soft hyphens only in addresses and #tags
        token = token.replace("\u00ad", "")
    if "Σ" in token:  # as in Java, it is final if a letter comes before and none after it, also after a hyphen
        token = re.sub(r"([^\W\d_][^?!]*)Σ(?=[\W\d_]*(?:[?!]|$))", r"\1ς", token).replace("Σ", "σ")
    return token.lower()


def metric_words(caption: str, language: str) -> list[str]:
    """The words of one raw caption, on which metrics are computed."""
    return tokenize(caption) if language == ENGLISH else TOKENIZERS[metric_tokenizer(language)].split(caption)


def words_of_all(captions: Sequence[str], language: str) -> list[list[str]]:
    """The words of each raw caption. English captions are read as the lines of one file (`tokenize_all`)."""
    if language == ENGLISH:
        return tokenize_all(captions)
    return [metric_words(caption, language) for caption in captions]


def words_signature(language: str) -> str:
    """The part of a score's signature that names the tokenizer, and the language if it is not English."""
    if language == ENGLISH:
        return f"tok:{SIGNATURE}"
    return f"tok:{metric_tokenizer(language)}-{VERSION}|lang:{language}"


def caption_stats(captions: Sequence[Sequence[str]], language: str = ENGLISH) -> Values:
    """Statistics of tokenized captions: shares (0 to 1) of the captions, and counts.

    empty: the share without a word. broken_endings: the share whose last word needs another word after it, or None if
    the language is not English. doubled_words: the share in which a word is followed by itself. repeated_ngrams: {n:
    the share that contains an n-gram twice}. mean_length: in words. distinct_words: the number of different words.
    """
    total = max(len(captions), 1)
    stats: Values = {
        "empty": sum(not tokens for tokens in captions) / total,
        "broken_endings": None,
        "doubled_words": sum(any(a == b for a, b in pairwise(tokens)) for tokens in captions) / total,
        "repeated_ngrams": {str(n): sum(_repeats(tokens, n) for tokens in captions) / total for n in (2, 3, 4)},
        "mean_length": sum(map(len, captions)) / total,
        "distinct_words": len({word for tokens in captions for word in tokens}),
    }
    if language == ENGLISH:
        stats["broken_endings"] = sum(tokens[-1] in OPEN_ENDINGS for tokens in captions if tokens) / total
    return stats


def _repeats(tokens: Sequence[str], order: int) -> bool:
    """True if some n-gram of `order` words occurs twice."""
    ngrams = [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]
    return len(set(ngrams)) < len(ngrams)
