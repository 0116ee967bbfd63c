"""Metrics that are not computed by default, against plain implementations of their formulas."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from pycocoevalcap.bleu.bleu import Bleu

from raycap.pipeline.data.caption_files import read_n_best, write_n_best
from raycap.pipeline.evaluation.scores.grounding import Objects
from raycap.pipeline.evaluation.scores.metrics import (
    DEFAULT_METRICS,
    ScoreInputs,
    metrics_of_split,
    score_captions,
    why_unavailable,
)
from raycap.pipeline.evaluation.scores.words import metric_words

WORDS = ["a", "the", "man", "dog", "on", "red", "street", "x", "y", "runs"]


def made_up(num_images: int, seed: int) -> tuple[dict[int, list[str]], dict[int, str]]:
    """References and predictions of few words, so that words repeat; some captions are empty or of one word."""
    source = random.Random(seed)

    def caption() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.choice([0, 1, 2, 3, 6, 9, 15, 40])))

    references = {image: [caption() for _ in range(source.randint(1, 5))] for image in range(num_images)}
    return references, {image: source.choice([caption(), source.choice(references[image])]) for image in references}


def test_further_metrics_are_computed_where_they_are_named() -> None:
    assert metrics_of_split((), is_test=True) == DEFAULT_METRICS
    on_validation = metrics_of_split(["Div-1"], is_test=False)
    assert on_validation[-1] == "Div-1" and "SPICE" not in on_validation


@pytest.mark.parametrize(
    ("caption", "objects"),
    [
        ("A dog and two hot dogs!", ["dog", "hot dog"]),
        ("puppies with people", ["dog", "person"]),
        ("the policemen's bus", ["person", "bus"]),
        ("buses", ["bus"]),
        ("hot water", []),
        ("a baby dog", ["dog"]),  # the longer name counts: the baby is no person
        ("", []),
    ],
)
def test_mentions_of_objects(caption: str, objects: list[str]) -> None:
    names = {"dog": ["dog", "puppy", "baby dog"], "hot dog": ["hot dog"], "bus": ["bus"]}
    names |= {"person": ["person", "policeman", "baby"]}
    scores = score_captions({1: ["nothing"]}, {1: caption}, metrics=["CHAIR-s"], inputs=ScoreInputs(Objects(names)))
    assert scores.values == {"CHAIR-s": float(bool(objects))}
    assert Objects(names).mentions(metric_words(caption, "en")) == objects


def test_chair_counts_mentions_and_captions() -> None:
    objects = Objects({"dog": ["dog"], "cat": ["cat"], "bus": ["bus"]}, annotated={2: {"bus"}})
    references = {1: ["a dog"], 2: ["a cat", "an animal"], 3: ["a tree"]}
    captions = {1: "a dog and a cat on a bus", 2: "a bus and a cat", 3: "a tree"}
    inputs = ScoreInputs(objects)
    scores = score_captions(references, captions, metrics=["CHAIR-i", "CHAIR-s"], inputs=inputs)
    assert scores.values == {"CHAIR-i": 2 / 5, "CHAIR-s": pytest.approx(1 / 3)}
    assert scores.by_name["CHAIR-s"].per_image == [1.0, 0.0, 0.0]
    nothing = score_captions(references, {3: "a tree"}, metrics=["CHAIR-i", "CHAIR-s"], inputs=inputs)
    assert nothing.by_name["CHAIR-i"].unavailable == "no caption names an object" and nothing.values["CHAIR-s"] == 0


def several_captions(num_images: int, seed: int) -> dict[int, list[str]]:
    source = random.Random(seed)
    return {
        image: [
            " ".join(source.choice(WORDS) for _ in range(source.choice([1, 2, 4, 7, 11])))
            for _ in range(source.randint(2, 6))
        ]
        for image in range(num_images)
    }


def test_diversity_follows_its_formulas() -> None:
    references, predictions = made_up(20, 3)
    several = several_captions(20, 4)
    names = ["Div-1", "Div-2", "mBLEU-4"]
    scores = score_captions(references, predictions, metrics=names, inputs=ScoreInputs(several=several)).by_name
    for image, captions in several.items():
        words = [caption.split() for caption in captions]
        for order in (1, 2):
            distinct = {tuple(each[k : k + order]) for each in words for k in range(len(each) - order + 1)}
            value = (scores[f"Div-{order}"].per_image or [])[image]
            assert value == pytest.approx(len(distinct) / sum(map(len, words)))
        bleu = [
            Bleu(4).compute_score({0: captions[:k] + captions[k + 1 :]}, {0: [caption]}, verbose=0)[0][3]
            for k, caption in enumerate(captions)
        ]
        assert (scores["mBLEU-4"].per_image or [])[image] == pytest.approx(np.mean(bleu), abs=1e-9)


def test_without_their_inputs_metrics_are_unavailable() -> None:
    references, predictions = made_up(3, 5)
    several = {image: ["a dog", "a man"][: 1 + image] for image in references}
    for inputs in (ScoreInputs(), ScoreInputs(several=several)):
        names = ["CHAIR-i", "CHAIR-s", "Div-1", "Div-2", "mBLEU-4"]
        scores = score_captions(references, predictions, metrics=names, inputs=inputs).by_name
        assert all(score.value is None and score.unavailable for score in scores.values())
    assert scores["Div-1"].unavailable == "1 of 3 images have fewer than two captions (ids 0)"
    for name, words in (("CHAIR-s", "inputs.objects"), ("Div-1", "num_results"), ("PAC-S", "inputs.pac")):
        assert words in (why_unavailable(name, inputs=ScoreInputs()) or "") and why_unavailable(name) is None
    assert why_unavailable("Div-1", inputs=ScoreInputs(several=several)) is None


def test_n_best_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "n-best.jsonl"
    write_n_best(path, {7: [{"caption": "a dög", "log_prob": -1.0}, {"caption": ""}], 8: []})
    assert read_n_best(path) == {7: ["a dög", ""], 8: []}
