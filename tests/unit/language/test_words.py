"""Words and characters in many scripts, against Unicode's rules in other implementations."""

from __future__ import annotations

import json
import shutil
import subprocess
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
from tests.support.scripts import CAPTIONS, WITHOUT_SPACES

ALL = CAPTIONS | WITHOUT_SPACES
LETTERS = sorted({char for caption in ALL.values() for char in caption} | set("a1.,:'’_-\"\n\u0301\u200d\u05f4"))
TEXTS = st.text(st.sampled_from(LETTERS), max_size=30)
NEW = ("unicode", "characters")


def words_of(caption: str, tokenizer: str) -> list[str]:
    return TOKENIZERS[tokenizer].split(caption)


def vocabulary_of(caption: str, tokenizer: str) -> Vocabulary:
    return Vocabulary.build([words_of(caption, tokenizer) or ["a"]], 1, tokenizer)


def test_there_are_enough_scripts() -> None:
    assert len(ALL) >= 40


@pytest.mark.parametrize("tokenizer", NEW)
@pytest.mark.parametrize("script", ALL)
def test_captions_of_every_script_come_back(script: str, tokenizer: str) -> None:
    """In any normal form, without punctuation, and with every letter."""
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


def test_runs_of_latin_letters_and_digits_stay_words() -> None:
    caption = "穿着 Blue 2024 T恤的 iPhone，ทำ Cafe\u0301 ๒๕"
    assert characters(caption) == [*"穿着", "blue", "2024", "t", *"恤的", "iphone", "ทำ", "café", "๒๕"]
    vocabulary = vocabulary_of(caption, "characters")
    assert vocabulary.decode(vocabulary.encode(characters(caption))) == "穿着blue 2024 t恤的iphoneทำcafé ๒๕"


def test_the_narrow_space_of_french_punctuation_separates_words() -> None:
    assert unicode_words("Un chat\u202f! Deux\u202fchats\u202f?") == ["un", "chat", "deux", "chats"]


def test_marks_of_direction_do_not_make_other_words() -> None:
    assert unicode_words("\u200fدائرة\u200f \u202bحمراء\u202c") == ["دائرة", "حمراء"]
    assert unicode_words("re\u00adcycled") == ["recycled"]
    assert unicode_words("می\u200cچرخد") == ["می\u200cچرخد"]


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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, whose Intl.Segmenter is ICU")
def test_words_equal_icu() -> None:
    """ICU finds words of Chinese, Japanese, Thai, Lao, Khmer and Burmese in dictionaries, so these are left out."""
    captions = [normalized(caption) for caption in CAPTIONS.values()]
    captions += ["the dog's 3,000.5 balls can't be 5 pm", "l'arbre x_y 12-14", 'שלום\u05f4ל צה"ל']
    script = """
      const words = new Intl.Segmenter("en", {granularity: "word"});
      const captions = JSON.parse(require("fs").readFileSync(0, "utf8"));
      const split = (text) => [...words.segment(text)].filter((each) => each.isWordLike).map((each) => each.segment);
      console.log(JSON.stringify(captions.map(split)));
    """
    command = [str(shutil.which("node")), "-e", script]
    found = subprocess.run(command, input=json.dumps(captions), capture_output=True, text=True, check=True, timeout=60)
    assert [unicode_words(caption) for caption in captions] == json.loads(found.stdout)


@given(
    st.lists(st.sampled_from([*"一个红色圆形猫狗在，。！、（）", "t", " red ", " 2024 ", " Cafe\u0301 "]), max_size=20)
)
@settings(max_examples=200, deadline=None)
def test_characters_equal_sacrebleus_chinese_tokens(parts: list[str]) -> None:
    caption = "".join(parts)
    expected = [token for token in TokenizerZh()(normalized(caption)).split() if has_word(token)]
    assert characters(caption) == expected
