"""Captions of synthetic scenes in English and Chinese, and the main object that such a caption names.

A grammar has seven templates for scenes with two objects, and seven for scenes with one. All templates name the main
object before the second object, and a color before its shape.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from raycap.pipeline.data.language.tokenizers import normalized, tokenize

if TYPE_CHECKING:
    from raycap.pipeline.data.synthetic.scenes import Scene, SceneObject

CAPTIONS_PER_IMAGE = 5
Words = dict[str, str]
Forms = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Grammar:
    """How a language describes a scene.

    words: draws the words for the fields of the templates. end: the mark after a caption. colors, shapes: {English name
    of a color or shape: the forms in which captions have it}.
    """

    pair_templates: tuple[str, ...]
    single_templates: tuple[str, ...]
    words: Callable[[random.Random, Scene], Words]
    end: str
    colors: Forms
    shapes: Forms


def scene_captions(rng: random.Random, scene: Scene, language: str) -> list[str]:
    """Five captions of a scene, from five different templates. language: a key of GRAMMARS."""
    grammar = GRAMMARS[language]
    templates = grammar.single_templates if scene.second is None else grammar.pair_templates
    captions = []
    for template in rng.sample(templates, CAPTIONS_PER_IMAGE):
        caption = template.format(**grammar.words(rng, scene))
        captions.append(f"{caption[0].upper()}{caption[1:]}{grammar.end}")
    return captions


def main_object(caption: str, language: str = "en") -> tuple[str, str] | None:
    """(color, shape) in English of the first object in a caption. language: the caption's, a key of `GRAMMARS`.

    None if the caption names no shape, or no color before its first shape.
    """
    names = _names_of_forms(language)
    in_chinese = "|".join(map(re.escape, names))  # searched in the text, because Chinese has no spaces between words
    tokens = tokenize(caption) if language == "en" else re.findall(in_chinese, normalized(caption))
    color = None
    for kind, name in (names[token] for token in tokens if token in names):
        if kind == "shape":
            return None if color is None else (color, name)
        color = name
    return None


@cache
def _names_of_forms(language: str) -> dict[str, tuple[str, str]]:
    """{form in captions: ("color" or "shape", English name)}, the longest form first, so that it is matched first."""
    tables = (("color", GRAMMARS[language].colors), ("shape", GRAMMARS[language].shapes))
    names: dict[str, tuple[str, str]] = {}
    for kind, table in tables:
        for name, forms in table.items():
            names |= {normalized(form): (kind, name) for form in forms}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


# English. A word for a background must not be the color of an object, because `main_object` would take it for one.
_ENGLISH_SIZES = {"large": ("large", "big"), "medium": ("medium",), "small": ("small", "little")}
# {relation: (words as in "a star left of a circle", words as in "a star and a circle to its right")}
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


# Chinese. {shape: (noun, measure word)}
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
    """{field of the templates: an object's name}, with its size and without it. role: main or second."""
    noun, measure = _CHINESE_SHAPES[item.shape]
    color = f"{_CHINESE_COLORS[item.color]}{noun}"
    return {role: f"一{measure}{_CHINESE_SIZES[item.size]}{color}", f"plain_{role}": f"一{measure}{color}"}


GRAMMARS = {
    "en": Grammar(
        pair_templates=(
            "{main} {relation} {second}",
            "there is {main} {relation} {second}",
            "the picture shows {main} {relation} {second}",
            "{main} with {second} {inverse}",
            "{main} and {second} {inverse}",
            "{plain_main} is {relation} {plain_second}",
            "{plain_main} and {plain_second} on {background} background",
        ),
        single_templates=(
            "{main} {position} of the picture",
            "there is {main} {position}",
            "the picture shows {main} {position}",
            "{main} on {background} background",
            "{main} alone {position}",
            "{plain_main} is {position} of {background} picture",
            "{plain_main} {position} on {background} background",
        ),
        words=_english,
        end=".",
        colors={name: (name,) for name in _CHINESE_COLORS},
        shapes={name: (name,) for name in _CHINESE_SHAPES},
    ),
    "zh": Grammar(
        pair_templates=(
            "{main}在{second}的{relation}",
            "有{main}在{second}的{relation}",
            "图片上，{main}位于{second}的{relation}",
            "{main}，{inverse}有{second}",
            "{main}和{inverse}的{second}",
            "{plain_main}位于{plain_second}的{relation}",
            "{background}背景上的{plain_main}和{plain_second}",
        ),
        single_templates=(
            "{main}在图片的{position}",
            "图片的{position}有{main}",
            "这张图片的{position}画着{main}",
            "{background}背景上的{main}",
            "只有{main}在{position}",
            "{plain_main}在一张{background}图片的{position}",
            "{plain_main}在{background}背景的{position}",
        ),
        words=_chinese,
        end="。",
        colors={name: (_CHINESE_COLORS[name],) for name in _CHINESE_COLORS},
        shapes={name: _CHINESE_SHAPES[name][:1] for name in _CHINESE_SHAPES},
    ),
}
