"""Captions of synthetic scenes in five languages, and the main object that such a caption names.

A grammar has seven templates for scenes with two objects and seven for one. They name the main object before the second
one. The words of a template agree as the language requires: German adjectives with gender and case, Hindi adjectives
and participles with gender and case, Arabic adjectives, verbs and suffixes with gender, case and definiteness, and
Chinese measure words with their noun.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from raycap.pipeline.data.language.tokenizers import normalized, tokenize, unicode_words

if TYPE_CHECKING:
    from raycap.pipeline.data.synthetic.scenes import Scene, SceneObject

CAPTIONS_PER_IMAGE = 5
Words = dict[str, str]
Forms = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Grammar:
    """How a language describes a scene.

    words: draws the values of the templates' names for a scene. end: the mark after a caption. forms: returns the
    forms of each color and those of each shape in captions. color_follows: whether a color is named after its shape.
    """

    pair_templates: tuple[str, ...]
    single_templates: tuple[str, ...]
    words: Callable[[random.Random, Scene], Words]
    end: str
    forms: Callable[[], tuple[Forms, Forms]]
    color_follows: bool = False


def scene_captions(rng: random.Random, scene: Scene, language: str) -> list[str]:
    """Five captions from five different templates."""
    grammar = GRAMMARS[language]
    templates = grammar.single_templates if scene.second is None else grammar.pair_templates
    captions = []
    for template in rng.sample(templates, CAPTIONS_PER_IMAGE):
        caption = template.format(**grammar.words(rng, scene))
        captions.append(f"{caption[0].upper()}{caption[1:]}{grammar.end}")
    return captions


def main_object(caption: str, language: str = "en") -> tuple[str, str] | None:
    """(color, shape), by their English names, of the first object in a caption of a language of `GRAMMARS`.

    None when no shape is named, or no color with it.
    """
    follows, color, shape = GRAMMARS[language].color_follows, None, None
    for kind, name in _mentions(caption, language):
        if kind == "shape":
            if shape is not None:
                break
            shape = name
            if not follows:
                break
        elif not follows or shape is not None:
            color = name
            if follows:
                break
    return None if color is None or shape is None else (color, shape)


def shape_names(language: str) -> Forms:
    """The forms of each shape, by its English name, in captions of a language of `GRAMMARS`."""
    return GRAMMARS[language].forms()[1]


def _mentions(caption: str, language: str) -> Iterator[tuple[str, str]]:
    """("color" or "shape", English name) of each color and shape in a caption, in its order."""
    names = _names_of_forms(language)
    if language == "zh":  # words are not separated
        tokens = re.findall("|".join(map(re.escape, names)), normalized(caption))
    else:
        tokens = tokenize(caption) if language == "en" else unicode_words(caption)
    yield from (names[token] for token in tokens if token in names)


@cache
def _names_of_forms(language: str) -> dict[str, tuple[str, str]]:
    """("color" or "shape", English name) by form, the longest form first."""
    tables = zip(("color", "shape"), GRAMMARS[language].forms(), strict=True)
    names = {
        normalized(form): (kind, name) for kind, table in tables for name, forms in table.items() for form in forms
    }
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


# English. None of the background's words is a color of an object, because `main_object` takes it for the object's.
_ENGLISH_SIZES = {"large": ("large", "big"), "medium": ("medium",), "small": ("small", "little")}
# For each relation: words from the main object to the second one, and words from the second one to the main object.
_ENGLISH_RELATIONS = {
    "left": (("left of", "to the left of"), ("to its right", "on the right")),
    "right": (("right of", "to the right of"), ("to its left", "on the left")),
    "above": (("above", "over"), ("below it", "under it")),
    "below": (("below", "under"), ("above it", "over it")),
    "behind": (("behind", "around"), ("inside it", "inside")),
}


def _english(rng: random.Random, scene: Scene) -> Words:
    words = {"background": _article(scene.background), "position": scene.position or ""}
    words["main"], words["plain_main"] = _english_names(rng, scene.main)
    if scene.second is not None and scene.relation is not None:
        words["second"], words["plain_second"] = _english_names(rng, scene.second)
        words["relation"], words["inverse"] = map(rng.choice, _ENGLISH_RELATIONS[scene.relation])
    return words


def _english_names(rng: random.Random, item: SceneObject) -> tuple[str, str]:
    """An object's name with its size and without it, for example "a big red star" and "a red star"."""
    plain = f"{item.color} {item.shape}"
    return _article(f"{rng.choice(_ENGLISH_SIZES[item.size])} {plain}"), _article(plain)


def _article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _english_forms() -> tuple[Forms, Forms]:
    return {name: (name,) for name in _GERMAN_COLORS}, {name: (name,) for name in _GERMAN_SHAPES}


# German: the gender of a noun; adjectives without their ending
_GERMAN_SHAPES = {
    "circle": ("Kreis", "m"),
    "square": ("Quadrat", "n"),
    "triangle": ("Dreieck", "n"),
    "star": ("Stern", "m"),
    "cross": ("Kreuz", "n"),
}
_GERMAN_COLORS = {
    "red": "rot",
    "orange": "orangefarben",
    "yellow": "gelb",
    "green": "grün",
    "blue": "blau",
    "purple": "violett",
    "black": "schwarz",
}
_GERMAN_BACKGROUNDS = {"white": "weiß", "gray": "grau", "pink": "rosafarben", "cream": "cremefarben"}
_GERMAN_SIZES = {"large": "groß", "medium": "mittelgroß", "small": "klein"}
# The article and the ending of adjectives by case and gender
_GERMAN_ENDINGS = {
    ("nominative", "m"): ("ein", "er"),
    ("nominative", "n"): ("ein", "es"),
    ("accusative", "m"): ("einen", "en"),
    ("accusative", "n"): ("ein", "es"),
    ("dative", "m"): ("einem", "en"),
    ("dative", "n"): ("einem", "en"),
}
_GERMAN_RELATIONS = {
    "left": (("links von", "links neben"), ("rechts davon", "rechts daneben")),
    "right": (("rechts von", "rechts neben"), ("links davon", "links daneben")),
    "above": (("über", "oberhalb von"), ("darunter",)),
    "below": (("unter", "unterhalb von"), ("darüber",)),
    "behind": (("hinter",), ("darin",)),
}
_GERMAN_POSITIONS = {
    "in the middle": "in der Mitte",
    "on the left": "auf der linken Seite",
    "on the right": "auf der rechten Seite",
    "at the top": "am oberen Rand",
    "at the bottom": "am unteren Rand",
}


def _german(rng: random.Random, scene: Scene) -> Words:
    background = _GERMAN_BACKGROUNDS[scene.background]
    words = {"background": f"{background}em Hintergrund", "picture": f"eines {background}en Bildes"}
    words["position"] = _GERMAN_POSITIONS[scene.position] if scene.position else ""
    words |= _german_names("main", scene.main)
    if scene.second is not None and scene.relation is not None:
        words |= _german_names("second", scene.second)
        words["relation"], words["inverse"] = map(rng.choice, _GERMAN_RELATIONS[scene.relation])
    return words


def _german_names(role: str, item: SceneObject) -> Words:
    """The object in each case, with its size ("main_dative") and without it ("plain_main_dative")."""
    noun, gender = _GERMAN_SHAPES[item.shape]
    words = {}
    for (case, of_gender), (article, ending) in _GERMAN_ENDINGS.items():
        if of_gender == gender:
            color = f"{_GERMAN_COLORS[item.color]}{ending} {noun}"
            words[f"{role}_{case}"] = f"{article} {_GERMAN_SIZES[item.size]}{ending} {color}"
            words[f"plain_{role}_{case}"] = f"{article} {color}"
    return words


def _german_forms() -> tuple[Forms, Forms]:
    colors = {
        name: tuple(stem + end for end in ("", "e", "er", "es", "en", "em")) for name, stem in _GERMAN_COLORS.items()
    }
    return colors, {
        name: tuple(noun + end for end in ("", "s", "es", "e", "en")) for name, (noun, _) in _GERMAN_SHAPES.items()
    }


# Hindi: adjectives in -ā have three forms (direct masculine, oblique masculine, feminine); others have one. All shapes
# are masculine; the picture and the background are feminine.
_HINDI_SHAPES = {  # direct and oblique
    "circle": ("वृत्त", "वृत्त"),
    "square": ("वर्ग", "वर्ग"),
    "triangle": ("त्रिभुज", "त्रिभुज"),
    "star": ("तारा", "तारे"),
    "cross": ("क्रॉस", "क्रॉस"),
}
_HINDI_COLORS = {
    "red": ("लाल",),
    "orange": ("नारंगी",),
    "yellow": ("पीला", "पीले", "पीली"),
    "green": ("हरा", "हरे", "हरी"),
    "blue": ("नीला", "नीले", "नीली"),
    "purple": ("बैंगनी",),
    "black": ("काला", "काले", "काली"),
}
_HINDI_BACKGROUNDS = {"white": "सफ़ेद", "gray": "स्लेटी", "pink": "गुलाबी", "cream": "क्रीम रंग की"}
_HINDI_SIZES = {"large": ("बड़ा", "बड़े"), "medium": ("मझोला", "मझोले"), "small": ("छोटा", "छोटे")}
_HINDI_RELATIONS = {
    "left": (("के बाईं ओर", "की बाईं तरफ़"), ("उसके दाईं ओर", "उसकी दाईं तरफ़")),
    "right": (("के दाईं ओर", "की दाईं तरफ़"), ("उसके बाईं ओर", "उसकी बाईं तरफ़")),
    "above": (("के ऊपर",), ("उसके नीचे",)),
    "below": (("के नीचे",), ("उसके ऊपर",)),
    "behind": (("के पीछे", "के चारों ओर"), ("उसके अंदर", "उसके भीतर")),
}
_HINDI_POSITIONS = {  # after "तस्वीर", and alone
    "in the middle": ("के बीच में", "बीच में"),
    "on the left": ("के बाईं ओर", "बाईं ओर"),
    "on the right": ("के दाईं ओर", "दाईं ओर"),
    "at the top": ("के ऊपरी हिस्से में", "सबसे ऊपर"),
    "at the bottom": ("के निचले हिस्से में", "सबसे नीचे"),
}


def _hindi(rng: random.Random, scene: Scene) -> Words:
    background = _HINDI_BACKGROUNDS[scene.background]
    words = {"background": f"{background} पृष्ठभूमि", "picture": f"एक {background} तस्वीर"}
    words["position"], words["alone"] = _HINDI_POSITIONS[scene.position] if scene.position else ("", "")
    words |= _hindi_names("main", scene.main)
    if scene.second is not None and scene.relation is not None:
        words |= _hindi_names("second", scene.second)
        words["relation"], words["inverse"] = map(rng.choice, _HINDI_RELATIONS[scene.relation])
    return words


def _hindi_names(role: str, item: SceneObject) -> Words:
    """The object in both cases, with its size ("main_oblique") and without it ("plain_main_oblique")."""
    words = {}
    for number, case in enumerate(("direct", "oblique")):
        colors = _HINDI_COLORS[item.color]
        color = f"{colors[number % len(colors)]} {_HINDI_SHAPES[item.shape][number]}"
        words[f"{role}_{case}"] = f"एक {_HINDI_SIZES[item.size][number]} {color}"
        words[f"plain_{role}_{case}"] = f"एक {color}"
    return words


def _hindi_forms() -> tuple[Forms, Forms]:
    return _HINDI_COLORS, _HINDI_SHAPES


# Arabic, without vowel marks except the one of the indefinite accusative: masculine and feminine forms
_ARABIC_SHAPES = {  # noun, whether it is feminine
    "circle": ("دائرة", True),
    "square": ("مربع", False),
    "triangle": ("مثلث", False),
    "star": ("نجمة", True),
    "cross": ("صليب", False),
}
_ARABIC_COLORS = {
    "red": ("أحمر", "حمراء"),
    "orange": ("برتقالي", "برتقالية"),
    "yellow": ("أصفر", "صفراء"),
    "green": ("أخضر", "خضراء"),
    "blue": ("أزرق", "زرقاء"),
    "purple": ("بنفسجي", "بنفسجية"),
    "black": ("أسود", "سوداء"),
}
_ARABIC_BACKGROUNDS = {"white": "بيضاء", "gray": "رمادية", "pink": "وردية", "cream": "كريمية"}  # feminine
_ARABIC_SIZES = {"large": ("كبير", "كبيرة"), "medium": ("متوسط", "متوسطة"), "small": ("صغير", "صغيرة")}
_ARABIC_RELATIONS = {  # the inverse without the suffix of its pronoun
    "left": (("على يسار", "إلى يسار"), ("على يمين", "إلى يمين")),
    "right": (("على يمين", "إلى يمين"), ("على يسار", "إلى يسار")),
    "above": (("فوق",), ("تحت", "أسفل")),
    "below": (("تحت", "أسفل"), ("فوق",)),
    "behind": (("خلف", "وراء"), ("داخل", "بداخل")),
}
_ARABIC_POSITIONS = {  # before the picture, and alone
    "in the middle": ("في وسط", "في الوسط"),
    "on the left": ("على يسار", "على اليسار"),
    "on the right": ("على يمين", "على اليمين"),
    "at the top": ("في أعلى", "في الأعلى"),
    "at the bottom": ("في أسفل", "في الأسفل"),
}
_TANWIN = "\u064b"  # the mark of the indefinite accusative, before the alif of masculine nouns


def _arabic(rng: random.Random, scene: Scene) -> Words:
    is_feminine = _ARABIC_SHAPES[scene.main.shape][1]
    words = {"background": f"خلفية {_ARABIC_BACKGROUNDS[scene.background]}"}
    words["picture"] = f"صورة {_ARABIC_BACKGROUNDS[scene.background]}"
    words["lies"], words["by_itself"] = ("تقع", "وحدها") if is_feminine else ("يقع", "وحده")
    words["position"], words["alone"] = _ARABIC_POSITIONS[scene.position] if scene.position else ("", "")
    words |= _arabic_names("main", scene.main)
    if scene.second is not None and scene.relation is not None:
        words |= _arabic_names("second", scene.second)
        words["relation"], inverse = map(rng.choice, _ARABIC_RELATIONS[scene.relation])
        words["inverse"] = inverse + ("ها" if is_feminine else "ه")
    return words


def _arabic_names(role: str, item: SceneObject) -> Words:
    """The object: indefinite with its size ("main", "main_accusative") and without ("plain_main"), and definite."""
    noun, is_feminine = _ARABIC_SHAPES[item.shape]
    size, color = _ARABIC_SIZES[item.size][is_feminine], _ARABIC_COLORS[item.color][is_feminine]
    return {
        role: f"{noun} {size} {color}",
        f"{role}_accusative": " ".join(map(_arabic_accusative, (noun, size, color))),
        f"plain_{role}": f"{noun} {color}",
        f"definite_{role}": f"ال{noun} ال{color}",
    }


def _arabic_accusative(word: str) -> str:
    """The indefinite accusative. Feminine words do not change in writing, nor do colors like أحمر (diptotes)."""
    return word if word.endswith(("ة", "اء")) or word.startswith("أ") else f"{word}{_TANWIN}ا"


def _arabic_forms() -> tuple[Forms, Forms]:
    """The words with and without article, in both cases, and after "and"."""

    def forms(words: tuple[str, ...]) -> tuple[str, ...]:
        bare = [form for word in words for form in (word, _arabic_accusative(word), f"{word}ا", f"ال{word}")]
        return tuple(dict.fromkeys(prefix + form for prefix in ("", "و") for form in bare))

    colors = {name: forms(words) for name, words in _ARABIC_COLORS.items()}
    return colors, {name: forms((noun,)) for name, (noun, _) in _ARABIC_SHAPES.items()}


# Chinese: the measure word of a noun
_CHINESE_SHAPES = {
    "circle": ("圆形", "个"),
    "square": ("正方形", "个"),
    "triangle": ("三角形", "个"),
    "star": ("星星", "颗"),
    "cross": ("十字", "个"),
}
_CHINESE_COLORS = {
    "red": "红色",
    "orange": "橙色",
    "yellow": "黄色",
    "green": "绿色",
    "blue": "蓝色",
    "purple": "紫色",
    "black": "黑色",
}
_CHINESE_BACKGROUNDS = {"white": "白色", "gray": "灰色", "pink": "粉色", "cream": "米色"}
_CHINESE_SIZES = {"large": "大的", "medium": "中等大小的", "small": "小的"}
_CHINESE_RELATIONS = {
    "left": (("左边", "左侧"), ("它右边", "它右侧")),
    "right": (("右边", "右侧"), ("它左边", "它左侧")),
    "above": (("上面", "上方"), ("它下面", "它下方")),
    "below": (("下面", "下方"), ("它上面", "它上方")),
    "behind": (("后面", "后方"), ("它里面", "它前面")),
}
_CHINESE_POSITIONS = {
    "in the middle": "中间",
    "on the left": "左边",
    "on the right": "右边",
    "at the top": "上方",
    "at the bottom": "下方",
}


def _chinese(rng: random.Random, scene: Scene) -> Words:
    words = {"background": _CHINESE_BACKGROUNDS[scene.background]}
    words["position"] = _CHINESE_POSITIONS[scene.position] if scene.position else ""
    words |= _chinese_names("main", scene.main)
    if scene.second is not None and scene.relation is not None:
        words |= _chinese_names("second", scene.second)
        words["relation"], words["inverse"] = map(rng.choice, _CHINESE_RELATIONS[scene.relation])
    return words


def _chinese_names(role: str, item: SceneObject) -> Words:
    """The object with its size and without it."""
    noun, measure = _CHINESE_SHAPES[item.shape]
    color = f"{_CHINESE_COLORS[item.color]}{noun}"
    return {role: f"一{measure}{_CHINESE_SIZES[item.size]}{color}", f"plain_{role}": f"一{measure}{color}"}


def _chinese_forms() -> tuple[Forms, Forms]:
    return (
        {name: (word,) for name, word in _CHINESE_COLORS.items()},
        {name: (noun,) for name, (noun, _) in _CHINESE_SHAPES.items()},
    )


GRAMMARS = {
    "en": Grammar(
        (
            "{main} {relation} {second}",
            "there is {main} {relation} {second}",
            "the picture shows {main} {relation} {second}",
            "{main} with {second} {inverse}",
            "{main} and {second} {inverse}",
            "{plain_main} is {relation} {plain_second}",
            "{plain_main} and {plain_second} on {background} background",
        ),
        (
            "{main} {position} of the picture",
            "there is {main} {position}",
            "the picture shows {main} {position}",
            "{main} on {background} background",
            "{main} alone {position}",
            "{plain_main} is {position} of {background} picture",
            "{plain_main} {position} on {background} background",
        ),
        _english,
        ".",
        _english_forms,
    ),
    "de": Grammar(
        (
            "{main_nominative} {relation} {second_dative}",
            "es gibt {main_accusative} {relation} {second_dative}",
            "das Bild zeigt {main_accusative} {relation} {second_dative}",
            "{main_nominative} mit {second_dative} {inverse}",
            "{main_nominative} und {second_nominative} {inverse}",
            "{plain_main_nominative} befindet sich {relation} {plain_second_dative}",
            "{plain_main_nominative} und {plain_second_nominative} auf {background}",
        ),
        (
            "{main_nominative} {position} des Bildes",
            "es gibt {main_accusative} {position}",
            "das Bild zeigt {main_accusative} {position}",
            "{main_nominative} auf {background}",
            "{main_nominative} allein {position}",
            "{plain_main_nominative} befindet sich {position} {picture}",
            "{plain_main_nominative} {position} auf {background}",
        ),
        _german,
        ".",
        _german_forms,
    ),
    "hi": Grammar(
        (
            "{main_direct}, {second_oblique} {relation}",
            "{main_direct} {second_oblique} {relation} है",
            "तस्वीर में {main_direct} {second_oblique} {relation} दिख रहा है",
            "{main_direct} और {inverse} {second_direct}",
            "यहाँ {main_direct} है और {inverse} {second_direct} है",
            "{plain_main_direct} {plain_second_oblique} {relation} बना है",
            "{background} पर {plain_main_direct} और {plain_second_direct}",
        ),
        (
            "{main_direct}, तस्वीर {position}",
            "तस्वीर {position} {main_direct} है",
            "तस्वीर में {alone} {main_direct} दिख रहा है",
            "{background} पर {main_direct}",
            "{alone} केवल {main_direct}",
            "{plain_main_direct} {picture} {position} है",
            "{background} पर {alone} {plain_main_direct}",
        ),
        _hindi,
        "।",
        _hindi_forms,
    ),
    "ar": Grammar(
        (
            "{main} {relation} {second}",
            "هناك {main} {relation} {second}",
            "تعرض الصورة {main_accusative} {relation} {second}",
            "{main} مع {second} {inverse}",
            "{main} و{second} {inverse}",
            "{lies} {definite_main} {relation} {definite_second}",
            "{plain_main} و{plain_second} على {background}",
        ),
        (
            "{main} {position} الصورة",
            "هناك {main} {alone}",
            "تعرض الصورة {main_accusative} {alone}",
            "{main} على {background}",
            "{main} {by_itself} {alone}",
            "{lies} {definite_main} {position} {picture}",
            "{plain_main} {alone} على {background}",
        ),
        _arabic,
        ".",
        _arabic_forms,
        color_follows=True,
    ),
    "zh": Grammar(
        (
            "{main}在{second}的{relation}",
            "有{main}在{second}的{relation}",
            "图片上，{main}位于{second}的{relation}",
            "{main}，{inverse}有{second}",
            "{main}和{inverse}的{second}",
            "{plain_main}位于{plain_second}的{relation}",
            "{background}背景上的{plain_main}和{plain_second}",
        ),
        (
            "{main}在图片的{position}",
            "图片的{position}有{main}",
            "这张图片的{position}画着{main}",
            "{background}背景上的{main}",
            "只有{main}在{position}",
            "{plain_main}在一张{background}图片的{position}",
            "{plain_main}在{background}背景的{position}",
        ),
        _chinese,
        "。",
        _chinese_forms,
    ),
}
