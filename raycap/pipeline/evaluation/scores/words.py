"""Splits captions into the words on which metrics are computed, and computes further statistics of these words.

English captions are split as by pycocoevalcap's PTBTokenizer, and other captions by the tokenizer of their language.
The model's tokenizer is not used, so that scores of models with different tokenizers can be compared.

pycocoevalcap 1.2 runs Stanford CoreNLP 3.4.1 (`PTBTokenizer -preserveLines -lowerCase`) over all captions, one per
line, and drops the tokens in `PUNCTUATION`. The rules here were derived from that program's output, not from its source
code, and tests compare both outputs. At each position the tokenizer takes the longest match of all rules, or the first
rule among equally long matches. A rule may look ahead: its second pattern then matches the text after the token. The
text after the token counts in the length of the match, but is tokenized afterwards. A plain piece between spaces (a
word, possibly with a comma, a full stop or 's) needs no rule.

Known differences, none of which occurs in the 242,654 captions of COCO val2014 and Flickr8k: scripts with vowel signs
(Thai, Devanagari), runs of different curly quotes, letters after a tag or e-mail address. A line separator inside a
caption is treated as a space here, while in pycocoevalcap it shifts all later captions.
"""

from __future__ import annotations

import re
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
_ANY_QUOTE = "['’‘`\u0091\u0092]"
# The PTB tokenizer's letters differ from Python's \w, so \w needs two corrections: superscripts and fractions
# (_NO_LETTERS) are not letters, and combining accents and soft hyphens (_MARKS) are.
_NO_LETTERS = "\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209c\u2150-\u218f\u2460-\u249b\U00010000-\U0010ffff"
_MARKS = "\u0300-\u036f\u00ad"
_DIGIT = "[0-9]"
_LETTER = rf"(?:[^\W\d_{_NO_LETTERS}]|[{_MARKS}])"
_ALNUM = rf"(?:[^\W_{_NO_LETTERS}]|[{_MARKS}])"
_ELIDED = f"(?:[dDoOlL]{_ANY_QUOTE}{_ALNUM})?"  # the start of a word such as d'or or O'Neill
_ACRONYM = r"[A-Za-z](?:\.[A-Za-z])+"
_HYPHENATED = rf"{_ALNUM}+(?:-[A-Za-z]+){{0,2}}"
_COMPANY = "[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+"
_LABEL = r"[^\s\"<>|.!?(){},\-/_=$'@:;0-9]+"  # one part of a domain name
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
    (r"<[A-Za-z][\w:.-]*(?: +[A-Za-z][\w:.-]*(?:=\"[^\"<>\n]*\")?)* */?>", ""),
    (r"</[A-Za-z][\w:.-]*>|<[!?][A-Za-z-][^<>\n]*>", ""),
    (r"&(?:lt|gt|amp|quot|apos|nbsp|mdash|#[0-9]+);", ""),
    (r"https?://[^\s<>\"|(){}]+[^\s<>\"|.!?(),;:{}-]", ""),
    (r"(?i:www)\.(?:[^\s\"<>|.!?(){},]+\.)+[A-Za-z]{2,4}", ""),
    (rf"(?:{_LABEL}\.)+(?:com|net|org|edu)(?:/[^\s\"<>|(){{}}]*[^\s\"<>|.!?(){{}},-])?", ""),
    (r"[A-Za-z0-9][^\s\"<>|(){}]*@[^\s\"<>|(){}.]+(?:\.[^\s\"<>|(){}.]+)*", ""),
    (r"@[A-Za-z_][A-Za-z_0-9]*|#[A-Za-z]+", ""),
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
    (f"{_APOSTROPHE}{_DIGIT}{{2}}", r"\s"),
    (f"{_LETTER}+[aeiouyAEIOUY]{_ANY_QUOTE}[aeiouA-Z]{_LETTER}*", ""),
    # Words
    (f"{_ELIDED}{_ALNUM}+(?:[-_]{_ELIDED}{_ALNUM}+)*", ""),
    (rf"[A-Za-z0-9][A-Za-z0-9.,]*(?:-(?:{_ACRONYM}\.|[A-Za-z0-9]+))+", ""),
    (f"{_HYPHENATED}(?:/{_HYPHENATED}){{1,2}}", ""),
    (_COMPANY, ""),
    (rf"{_LETTER}{_ALNUM}*(?:[.!?]{_LETTER}{_ALNUM}*)+", ""),
    (r"[CcFf](?:\+\+|#)", ""),
    # Numbers
    (rf"[-+]?(?:{_DIGIT}*(?:[.:,]{_DIGIT}+)+|{_DIGIT}+)", ""),
    (rf"{_DIGIT}{{1,2}}[-/]{_DIGIT}{{1,2}}[-/]{_DIGIT}{{2,4}}", ""),
    (rf"(?:{_DIGIT}{{1,4}}[- \u00a0])?{_DIGIT}{{1,4}}(?:\\?/|⁄){_DIGIT}{{1,4}}", ""),
    (rf"(?:\({_DIGIT}{{2,3}}\)[ \u00a0]?|\+{{0,2}}{_DIGIT}{{2,4}}[- \u00a0]){_LOCAL_NUMBER}", ""),
    # Abbreviations
    (rf"(?:{_any_case(_ABBREVIATIONS)}|{_not_upper(_NOT_UPPER)})\.", ""),
    (rf"(?:{_any_case(_CLOSING_ABBREVIATIONS)}|{_not_upper(_CLOSING_NOT_UPPER)})\.", r"[\s\S]{0,2}"),
    (rf"{_capitalized(_CAPITALIZED_ABBREVIATIONS)}\.", r"[\s\S]{0,2}"),
    (rf"{_any_case(_NUMBER_ABBREVIATIONS)}\.", f"[ \t\n\u00a0]?{_DIGIT}"),
    (rf"{_ACRONYM}\.?", ""),
    (rf"{_ALNUM}+\.{_any_case(_FILE_EXTENSIONS)}", r"[\s.?!,]"),
    ("[A-Za-z]", rf"\.\s+{_capitalized(_SENTENCE_STARTS)}\s"),
    (r"[A-Za-z]\.", ""),
    (rf"(?:{_COMPANY}|{_ALNUM}+(?:[-_]{_ALNUM}+)*|{_LETTER}{_ALNUM}*(?:[.!?]{_LETTER}{_ALNUM}*)+)\.", "[,;:]"),
    # Faces
    (r"[<>]?[:;=][-o*']?[()DPdpO\\{@|\[\]]", "[^A-Za-z0-9]"),
    (rf"{_EYE}_{_EYE}|\({_EYE}[_.]?{_EYE}\)", ""),
    # Punctuation
    ("'", "[A-Za-z][^ \t\n\r\u00a0]"),
    (r"[A-Z]*\$", ""),
    (r"\.(?: ?\.){2,}", ""),
    (r"--?-?-?|-{5,}", ""),
    (r"[!?]+|''|``|_+|\*+|#+|@+|<<|>>", ""),
    (r"[“”«»‘’‹›„‚\u0091-\u0094][“”«»‘’‹›„‚\u0091-\u0094'`]", ""),
    ("[\\S\u0085]", ""),
)

# {token: form in which the PTB tokenizer prints it}. `tokenize` drops tokens whose printed form is punctuation.
_PRINT_FORMS = (
    dict.fromkeys("“«\u0093", "``")
    | dict.fromkeys('”»\u0094"', "''")
    | dict.fromkeys("‘‹\u0091", "`")
    | dict.fromkeys("’›\u0092", "'")
    | dict.fromkeys("–—\u0096\u0097", "--")
    | dict.fromkeys("…\u0085", "...")
    | dict.fromkeys("€¤\u0080", "$")
    | {"£": "#", "¢": "cents", "½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
    | {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": "''", "&apos;": "'", "&nbsp;": "", "&mdash;": "--"}
    | {"\u00ad": "", "---": "--", "----": "--"}
    | {"(": "-lrb-", ")": "-rrb-", "{": "-lcb-", "}": "-rcb-", "[": "-lsb-", "]": "-rsb-"}
)
_QUOTES = frozenset("“”«»‘’‹›„‚\u0091\u0092\u0093\u0094'`")
_DROPPED = PUNCTUATION | {"", "\u200b", "\ufeff"}  # \u200b and \ufeff are characters without width
_FIRST_DROPPED = "\U00010000"  # tokens from this character on, such as emoji, are dropped
_PIECE = re.compile(r"\S+")


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
    text = caption.replace("\n", " ") + "\n" + following
    tokens: list[str] = []
    position = 0
    while position < len(caption):
        if text[position].isspace() and text[position] != "\u0085":  # PTB reads \u0085 as "...", not as a space
            position += 1
            continue
        is_start = position == 0 or text[position - 1].isspace()
        piece = _PIECE.match(text, position) if is_start else None
        plain = _plain_tokens(piece[0]) if piece else None
        if piece and plain is not None:
            tokens += plain
            position = piece.end()
            continue
        matches = [match for pattern in _rules() if (match := pattern.match(text, position))]
        token = max(matches, key=re.Match.end)[1]  # `max` takes the first of equally long matches
        position += len(token)
        printed = _print_form(token)
        if token < _FIRST_DROPPED and printed not in _DROPPED:
            tokens.append(printed)
    return tokens


def _print_form(token: str) -> str:
    """The form in which the tokenizer prints a token: lower case, Treebank brackets, plain apostrophes."""
    if token in _PRINT_FORMS:
        return _PRINT_FORMS[token]
    token = token.replace("&apos;", "'").replace("&amp;", "&")
    if token[0] == "." and not token.strip(". "):
        return "..." if len(token) > 2 else token
    if len(token) == 2 and _QUOTES.issuperset(token):  # nested quotes
        return "".join(_PRINT_FORMS.get(character, character) for character in token)
    if len(token) > 1:  # PTB prints brackets inside a token in Treebank form, and spaces as no-break spaces
        token = token.replace("(", "-lrb-").replace(")", "-rrb-").replace(" ", "\u00a0").replace("\u00ad", "")
        if re.fullmatch("[’\u0092](?i:[msd]|ll|re|ve)|[nN][’\u0092][tT]", token):
            token = token.replace("’", "'").replace("\u0092", "'")
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
