"""Words and characters in many scripts, against other implementations of Unicode's rules. Captions that do not fit."""

from __future__ import annotations

import re
import unicodedata

import pytest
import uniseg.graphemecluster
import uniseg.wordbreak
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

from raycap.pipeline.data.language.tokenizers import (
    TOKENIZERS,
    characters,
    clusters,
    has_word,
    normalized,
    unicode_words,
)
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.runs.check import CaptionProblems, cuts_letters
from raycap.pipeline.runtime.names import quoted
from tests.support.scripts import CAPTIONS, WITHOUT_SPACES

ALL = CAPTIONS | WITHOUT_SPACES
LETTERS = sorted({char for caption in ALL.values() for char in caption} | set("a1.,:'’_-\"\n\u0301\u200d\u05f4"))
# A vowel sign of Thai or Lao needs a letter before it: without one, decoding joins it to the text before. A virama at
# the end of a word forms a cluster with a letter of a script without spaces that decoding joins to it.
VIRAMAS = "".join(letter for letter in LETTERS if unicodedata.combining(letter) == 9)
AMBIGUOUS = re.compile(rf"(^|[\W\d_])[ำຳ]|[{VIRAMAS}](?!\w)")
TEXTS = st.text(st.sampled_from(LETTERS), max_size=30).filter(lambda text: not AMBIGUOUS.search(text))
NEW = ("unicode", "characters")


def words_of(caption: str, tokenizer: str) -> list[str]:
    return TOKENIZERS[tokenizer].split(caption)


def vocabulary_of(caption: str, tokenizer: str) -> Vocabulary:
    return Vocabulary.build([words_of(caption, tokenizer) or ["a"]], 1, tokenizer)


@pytest.mark.parametrize("tokenizer", NEW)
@pytest.mark.parametrize("script", ALL)
def test_captions_of_every_script_come_back(script: str, tokenizer: str) -> None:
    """They come back in every normal form, with all letters and without punctuation."""
    caption = ALL[script]
    words = words_of(caption, tokenizer)
    assert words and not any(char.isspace() for word in words for char in word)
    assert not any(unicodedata.category(word[0]).startswith("M") for word in words)
    for form in ("NFC", "NFD"):
        assert words_of(unicodedata.normalize(form, caption), tokenizer) == words
    vocabulary = vocabulary_of(caption, tokenizer)
    decoded = vocabulary.decode(vocabulary.encode(words))
    assert words_of(decoded, tokenizer) == words
    assert "".join(vocabulary.parts(decoded)) == decoded and len(vocabulary.parts(decoded)) == len(words)
    assert {char for char in normalized(caption) if has_word(char)} <= set(decoded)


@pytest.mark.parametrize("script", sorted(CAPTIONS.keys() - {"Tibetan"}))  # a mark separates its syllables
def test_words_between_spaces_are_the_words(script: str) -> None:
    """Where spaces separate words, `unicode` finds them, and `characters` finds the same."""
    expected = [word.strip(",") for word in normalized(CAPTIONS[script]).split()]
    assert unicode_words(CAPTIONS[script]) == expected == characters(CAPTIONS[script])


@pytest.mark.parametrize("script", WITHOUT_SPACES)
def test_scripts_without_spaces_give_characters(script: str) -> None:
    caption = WITHOUT_SPACES[script]
    tokens = characters(caption)
    assert len(tokens) > 1
    for token in tokens:  # Burmese marks are clusters of their own
        assert not any(has_word(cluster) for cluster in clusters(token)[1:])
    vocabulary = vocabulary_of(caption, "characters")
    assert vocabulary.decode(vocabulary.encode(tokens)) == normalized(caption).replace("，", "")


def test_the_narrow_space_of_french_punctuation_separates_words() -> None:
    assert unicode_words("Un chat\u202f! Deux\u202fchats\u202f?") == ["un", "chat", "deux", "chats"]


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_words_equal_another_implementation(caption: str) -> None:
    """uniseg implements UAX #29 on tables of its own."""
    segments = uniseg.wordbreak.words(normalized(caption))
    assert unicode_words(caption) == [word for word in segments if has_word(word)]


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_tokens_do_not_depend_on_the_normal_form_and_come_back(caption: str) -> None:
    for tokenizer in NEW:
        tokens = words_of(caption, tokenizer)
        assert words_of(unicodedata.normalize("NFD", caption), tokenizer) == tokens
        vocabulary = vocabulary_of(caption, tokenizer)
        assert words_of(vocabulary.decode(vocabulary.encode(tokens)), tokenizer) == tokens


@given(
    st.lists(st.sampled_from([*"一个红色圆形猫狗在，。！、（）", "t", " red ", " 2024 ", " Cafe\u0301 "]), max_size=20)
)
@settings(max_examples=200, deadline=None)
def test_characters_equal_sacrebleus_chinese_tokens(parts: list[str]) -> None:
    caption = "".join(parts)
    expected = [token for token in TokenizerZh()(normalized(caption)).split() if has_word(token)]
    assert characters(caption) == expected


def warnings_of(tokenizer: str, *captions: str) -> list[str]:
    problems = CaptionProblems(tokenizer)
    for caption in captions:
        problems.add(caption, TOKENIZERS[tokenizer].split(caption))
    return list(problems.warnings())


def test_a_sound_set_has_no_warnings() -> None:
    assert warnings_of("expansionnet", "A red circle.", "Ein großer Kreis") == []
    for tokenizer in ("unicode", "subword"):
        assert warnings_of(tokenizer, *CAPTIONS.values()) == []
    assert warnings_of("characters", *WITHOUT_SPACES.values()) == []


def test_a_sentence_of_one_word_is_reported() -> None:
    (warning,) = warnings_of("expansionnet", "一个大的红色圆形", "一只猫", "a dog")
    assert warning.startswith("2 captions are one word for data.tokenizer = expansionnet, such as '一个大的红色圆形'")
    assert warning.endswith("set data.tokenizer to characters")
    (warning,) = warnings_of("expansionnet", "dog", "a red dog")
    assert warning == "1 caption is one word for data.tokenizer = expansionnet, such as 'dog'; look at them"


@pytest.mark.parametrize("script", ["Devanagari", "Tamil", "Arabic", "Hebrew", "Bengali", "Persian"])
def test_cut_letters_are_reported(script: str) -> None:
    caption = CAPTIONS[script]
    (warning,) = warnings_of("expansionnet", caption, "a red dog")
    assert "splits letters from their marks in 1 captions" in warning and quoted(caption) in warning
    assert warning.endswith("set data.tokenizer to unicode")
    assert not cuts_letters(caption, TOKENIZERS["unicode"].split(caption))
