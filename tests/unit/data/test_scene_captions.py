"""Captions of synthetic scenes in English and Chinese."""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path

import pytest

from raycap.pipeline.config.sections import SceneConfig
from raycap.pipeline.data.language.tokenizers import TOKENIZERS
from raycap.pipeline.data.synthetic.scene_captions import GRAMMARS, main_object
from raycap.pipeline.data.synthetic.scenes import make_scene, write_dataset


@pytest.mark.parametrize("language", GRAMMARS)
def test_all_languages_name_the_main_object(language: str) -> None:
    for index in range(300):
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


def test_the_chinese_grammar() -> None:
    """The characters of 300 scenes; nouns have their measure word."""
    captions = [caption for index in range(300) for caption in make_scene(0, index, "zh")[1]]
    text = "\n".join(captions)
    assert not [each for each in ("个星星", "个大的红色星星", "颗圆形", "颗大的红色圆形", "张圆形") if each in text]
    assert all(each in text for each in ("一颗大的", "一个大的", "一颗红色星星", "一张白色图片"))
    assert 30 < len({word for caption in captions for word in TOKENIZERS["characters"].split(caption)}) < 120
