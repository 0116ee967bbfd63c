"""Models of subwords: deterministic, without unknown pieces, bounded, and safe to read."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycap.pipeline.data.language.subwords import MAX_MERGES, SubwordModel
from raycap.pipeline.data.language.tokenizers import normalized
from raycap.pipeline.data.vocabulary import SPECIALS, UNK, Vocabulary
from tests.support.scripts import CAPTIONS, WITHOUT_SPACES

ALL = CAPTIONS | WITHOUT_SPACES
TRAINING = [caption for caption in ALL.values() for _ in range(3)] + ["a red circle", "a big red circle"] * 5
MODEL = Vocabulary.train_subwords(TRAINING, 600, 2)


def plain_split(model: SubwordModel, word: str) -> list[str]:
    """The pieces of a word by the definition: the pair that is first in the list is merged until there is none."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(model.merges)))}
    pieces = list(word)
    while present := [ranks[pair] for pair in pairwise(pieces) if pair in ranks]:
        left, right = model.merges[min(present)]
        merged: list[str] = []
        for piece in pieces:
            if merged and (merged[-1], piece) == (left, right):
                merged[-1] = left + right
            else:
                merged.append(piece)
        pieces = merged
    return pieces


def test_every_script_comes_back_without_unknown_pieces() -> None:
    """This includes scripts that the training captions do not have, in every normal form."""
    vocabulary = Vocabulary.train_subwords(["a red circle", "a blue circle"] * 5, 300, 2)
    for caption in ALL.values():
        for form in ("NFC", "NFD"):
            ids = vocabulary.encode(vocabulary.tokenize(unicodedata.normalize(form, caption)))
            assert vocabulary.ids[UNK] not in ids
            assert vocabulary.decode(ids) == normalized(caption)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(caption: str) -> None:
    tokens = MODEL.tokenize(caption)
    decoded = MODEL.decode(MODEL.encode(tokens))
    assert decoded == " ".join(normalized(caption).split())
    assert MODEL.tokens_of(decoded) == tokens and "".join(MODEL.parts(decoded)) == decoded


@pytest.mark.parametrize("word", ["a", "red", "circle", "rercircles", "bigcircle", "xylophone", "kreis", "größer"])
def test_pieces_follow_the_merges(word: str) -> None:
    assert MODEL.subwords is not None and len(MODEL.subwords.merges) > 100
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table of bytes
    others = iter(range(256, 512))
    char_of = {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
    assert MODEL.tokenize(word) == plain_split(MODEL.subwords, "".join(char_of[byte] for byte in f" {word}".encode()))


def test_training_is_deterministic_and_does_not_depend_on_the_order() -> None:
    expected = MODEL.to_json()
    assert Vocabulary.train_subwords(TRAINING, 600, 2).to_json() == expected
    assert Vocabulary.train_subwords(sorted(TRAINING), 600, 2).to_json() == expected


def test_the_file_holds_the_model(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    MODEL.save(path)
    loaded = Vocabulary.load(path)
    assert loaded == MODEL and loaded.tokenize("a bigger वृत्त") == MODEL.tokenize("a bigger वृत्त")
    assert json.loads(path.read_text()).keys() == {"tokenizer", "words", "merges"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "must be a list of two pieces"),
        ({"merges": ["a"]}, "must be a list of two pieces"),
        ({"merges": ["a b c"]}, "must be a list of two pieces"),
        ({"merges": [["a", "b"]]}, "must be a list of two pieces"),
        ({"merges": ["ab c"]}, "must be bytes or the results of earlier merges"),
        ({"merges": ["日 a"]}, "must be bytes or the results of earlier merges"),
        ({"merges": ["q x"]}, "lacks pieces"),
        ({"merges": ["a b"] * (MAX_MERGES + 1)}, "is the limit"),
        ({"tokenizer": "spacy"}, "no other tokenizer has one"),
        ({"words": list(SPECIALS)}, "lacks pieces"),
    ],
    ids=str,
)
def test_models_of_strangers_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(json.loads(MODEL.to_json()) | change))
    with pytest.raises(ValueError, match=message):
        Vocabulary.load(path)


def test_pieces_are_bounded() -> None:
    """Each merge doubles a piece."""
    with pytest.raises(ValueError, match="at most 256 bytes"):
        SubwordModel(tuple(("a" * 2**i, "a" * 2**i) for i in range(12)))
