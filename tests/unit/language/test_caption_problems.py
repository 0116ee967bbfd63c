"""Captions that a tokenizer does not fit."""

from __future__ import annotations

import unicodedata

import pytest

from raycap.pipeline.data.language.caption_problems import CaptionProblems, cuts_letters
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.runtime.names import quoted
from tests.support.scripts import CAPTIONS, WITHOUT_SPACES


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


def test_thai_letters_that_unicode_words_cut_are_reported() -> None:
    (warning,) = warnings_of("unicode", "วงกลมทำ", "ทำมือ")
    assert "splits letters from their marks in 2 captions" in warning and warning.endswith("to characters")


def test_mixed_normal_forms_are_reported_where_they_matter() -> None:
    composed = "Một hình tròn"
    decomposed = unicodedata.normalize("NFD", composed)
    warnings = warnings_of("expansionnet", composed, composed, decomposed)
    assert any(warning.startswith("1 captions are not in the normal form NFC") for warning in warnings)
    assert any("2 are, such as 'Một hình tròn': equal words count as different" in warning for warning in warnings)
    assert not any("normal form" in warning for warning in warnings_of("expansionnet", composed, composed))
    assert not any("normal form" in warning for warning in warnings_of("unicode", composed, decomposed))
