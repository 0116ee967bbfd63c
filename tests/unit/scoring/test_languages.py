"""Scores of captions in other languages than English."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks.reference_cider import PlainCiderD
from raycap.pipeline.data.language.tokenizers import characters, unicode_words
from raycap.pipeline.evaluation.scores.metrics import score_captions
from tests.support.scripts import scene_texts

SPLIT = {"hi": unicode_words, "zh": characters}


def captions_of(language: str, count: int = 12) -> tuple[dict[int, list[str]], dict[int, str]]:
    """References of scenes, and the captions of the scenes after them as predictions."""
    scenes = [scene_texts(3, index, language) for index in range(count + 1)]
    return dict(enumerate(scenes[:count])), {index: scenes[index + index % 2][0] for index in range(count)}


@pytest.mark.parametrize("language", SPLIT)
def test_cider_d_and_bleu_are_of_the_languages_words(language: str) -> None:
    references, predictions = captions_of(language)
    scores = score_captions(references, predictions, metrics=("BLEU-1", "CIDEr-D"), language=language)
    split = SPLIT[language]
    words = {image: [split(caption) for caption in captions] for image, captions in references.items()}
    plain = PlainCiderD(list(words.values()))
    expected = [plain.score(split(predictions[image]), words[image]) for image in references]
    assert scores.by_name["CIDEr-D"].per_image == pytest.approx(expected, rel=1e-9)
    assert 0.1 < sum(expected) / len(expected) < 10
    assert scores.values["BLEU-1"] == pytest.approx(
        plain_bleu_1(list(words.values()), [*map(split, predictions.values())])
    )


def plain_bleu_1(references: list[list[list[str]]], predictions: list[list[str]]) -> float:
    """BLEU-1 by its definition, with the closest reference length."""
    matches = guesses = closest = 0
    for captions, prediction in zip(references, predictions, strict=True):
        limits: Counter[str] = Counter()
        for caption in captions:
            limits |= Counter(caption)
        matches += (Counter(prediction) & limits).total()
        guesses += len(prediction)
        closest += min((abs(len(caption) - len(prediction)), len(caption)) for caption in captions)[1]
    return matches / guesses * min(1.0, math.exp(1 - closest / guesses))
