"""Captions of synthetic scenes in five languages."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path

import pytest

from raycap.pipeline.config.languages import suggested_tokenizer
from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.synthetic.scene_captions import GRAMMARS, main_object
from raycap.pipeline.data.synthetic.scenes import SHAPES, main_object_hits, make_scene, write_dataset

LANGUAGES = tuple(GRAMMARS)
OTHERS = tuple(language for language in LANGUAGES if language != "en")


@pytest.mark.parametrize("language", LANGUAGES)
def test_all_languages_name_the_main_object(language: str) -> None:
    for index in range(2000):
        scene, captions = make_scene(0, index, language)
        assert scene == make_scene(0, index)[0]
        assert len(set(captions)) == 5
        assert {main_object(each, language) for each in captions} == {(scene.main.color, scene.main.shape)}
        assert all("{" not in each and "  " not in each and unicodedata.is_normalized("NFC", each) for each in captions)


def test_english_captions_are_as_before(tmp_path: Path) -> None:
    """The digests are of the data set before there were other languages."""
    write_dataset(tmp_path / "set", SceneConfig(num_images=30, image_size=32))
    content = (tmp_path / "set" / "dataset.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "490f46c31c1f63c902ba08aba79d2d4fa397d811ee9a681f5c29ddf49e1bf666"
    marker = (tmp_path / "set" / "COMPLETE").read_text()
    assert marker == '{"format": 1, "num_images": 30, "image_size": 32, "seed": 0}'


def test_pictures_do_not_depend_on_the_language(tmp_path: Path) -> None:
    for language in ("en", "zh"):
        write_dataset(tmp_path / language, SceneConfig(num_images=30, image_size=32, language=language))
    for path in (tmp_path / "en" / "images").iterdir():
        assert path.read_bytes() == (tmp_path / "zh" / "images" / path.name).read_bytes()
    entry = json.loads((tmp_path / "zh" / "dataset.json").read_text())["images"][0]
    assert entry["sentences"][0]["tokens"] == TOKENIZERS["characters"].split(entry["sentences"][0]["raw"])


@pytest.mark.parametrize("language", OTHERS)
def test_grammar(language: str) -> None:
    """Every word of 500 scenes is one of a checked list, in which wrong forms of these words are absent."""
    split = TOKENIZERS[suggested_tokenizer(language)].split
    captions = [caption for index in range(500) for caption in make_scene(0, index, language)[1]]
    wrong = {
        "de": ["ein großer rotes", "eine ", "einen großen rotes", "von ein ", "zeigt ein roter"],
        "hi": ["छोटा नीला वर्ग के", "बड़ा तारे", "तारा के", "तारा की", "के बाईं तरफ़", "क्रीम रंग का पृष्ठभूमि"],
        "ar": ["دائرة كبير ", "دائرة أحمر", "مربع كبيرة", "مربع حمراء", "نجمة صغير ", "تقع المربع", "يقع الدائرة"],
        "zh": ["个星星", "个大的红色星星", "颗圆形", "颗大的红色圆形", "张圆形"],
    }[language]
    text = "\n".join(captions).lower()
    assert not [each for each in wrong if each in text]
    right = {
        "de": ["einen großen roten kreis", "einem kleinen blauen quadrat", "ein großes", "eines weißen bildes"],
        "hi": ["छोटे नीले तारे", "बड़ा नीला", "क्रीम रंग की पृष्ठभूमि", "उसकी दाईं तरफ़"],
        "ar": ["دائرة كبيرة", "مربعًا كبيرًا", "تقع الدائرة الحمراء", "على يمينها", "على يمينه", "وحدها", "وحده "],
        "zh": ["一颗大的", "一个大的", "一颗红色星星", "一张白色图片"],
    }[language]
    assert [each for each in right if each not in text] == []
    assert 30 < len({word for caption in captions for word in split(caption)}) < 120


@pytest.mark.parametrize("shape", SHAPES)
def test_german_articles_and_endings_agree(shape: str) -> None:
    """Against the table of a grammar book: the endings of each case for the noun's gender."""
    masculine = shape in ("circle", "star")
    nouns = {"circle": "Kreis", "square": "Quadrat", "triangle": "Dreieck", "star": "Stern", "cross": "Kreuz"}
    for index in range(300):
        for caption in make_scene(1, index, "de")[1]:
            words = caption.rstrip(".").split()
            for number, word in enumerate(words):
                if word != nouns[shape]:
                    continue
                start = max(i for i in range(number) if words[i].lower() in ("ein", "einen", "einem"))
                article, adjectives = words[start].lower(), words[start + 1 : number]
                ending = {"ein": "er" if masculine else "es", "einen": "en", "einem": "en"}[article]
                assert adjectives and all(each.endswith(ending) for each in adjectives), caption
                assert masculine or article != "einen", caption


@pytest.mark.parametrize(
    ("language", "caption", "expected"),
    [
        ("de", "auf dem Bild sind zwei rote Kreise", ("red", "circle")),
        ("de", "neben einem grünen Stern liegt ein rotes Kreuz", ("green", "star")),
        ("de", "ein Kreis", None),
        ("hi", "पीली तारा", ("yellow", "star")),
        ("hi", "एक बड़ा वृत्त", None),
        ("ar", "النجمة الصفراء فوق المربع", ("yellow", "star")),
        ("ar", "مربع ودائرة حمراء", None),
        ("ar", "أحمر", None),
        ("ar", "ومثلث أزرق", ("blue", "triangle")),
        ("zh", "有两个红色的圆形", ("red", "circle")),
        ("zh", "圆形是红色的", None),
        ("zh", "一个紫色三角形", ("purple", "triangle")),
    ],
)
def test_main_object_of_other_captions(language: str, caption: str, expected: tuple[str, str] | None) -> None:
    assert main_object(caption, language) == expected


def test_main_object_hits_in_another_language() -> None:
    references = {1: ["Ein roter Kreis.", "Es gibt einen roten Kreis über einem blauen Stern."]}
    assert main_object_hits({1: "das Bild zeigt einen großen roten Kreis"}, references, "de") == {1: True}
    assert main_object_hits({1: "ein roter Stern"}, references, "de") == {1: False}
    with pytest.raises(ValueError, match="name 0 main objects"):
        main_object_hits({1: "a red circle"}, references, "en")
