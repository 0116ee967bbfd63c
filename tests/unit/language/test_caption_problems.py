"""Captions that a tokenizer does not fit."""

from __future__ import annotations

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
