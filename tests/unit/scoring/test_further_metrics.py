"""Metrics that are not computed by default, against plain implementations of their formulas."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from jobs.bench.reference_cider import PlainCiderD
from pipeline.scoring.metrics import DEFAULT_METRICS, FURTHER_METRICS, metrics_of_split, score_captions

WORDS = ["a", "the", "man", "dog", "on", "red", "street", "x", "y", "runs"]


def made_up(num_images: int, seed: int) -> tuple[dict[int, list[str]], dict[int, str]]:
    """References and predictions of few words, so that words repeat; some captions are empty or of one word."""
    source = random.Random(seed)

    def caption() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.choice([0, 1, 2, 3, 6, 9, 15, 40])))

    references = {image: [caption() for _ in range(source.randint(1, 5))] for image in range(num_images)}
    return references, {image: source.choice([caption(), source.choice(references[image])]) for image in references}


def plain_cider_r(words: list[str], references: list[list[str]], cosine: PlainCiderD) -> float:
    """CIDEr-R of one caption, reference by reference."""
    total = 0.0
    for reference in references:
        bigrams = [max(len(caption) - 1, 0) for caption in (words, reference)]
        delta = bigrams[0] - bigrams[1]
        gaussian = math.exp(-(delta**2) / (2 * 6**2))  # CIDEr-D's, which is taken out again
        length = math.exp(-(delta**2) / bigrams[1] ** 2) if bigrams[1] else float(not delta)
        counts, others = Counter(words), Counter(reference)
        factors = [
            1 / (1 + (abs(count - others[word]) if word in others else count - 1)) for word, count in counts.items()
        ]
        repetition = math.prod(factors) ** (1 / len(factors)) if factors else 1.0
        total += cosine.score(words, [reference]) / gaussian * repetition**0.8 * length**0.2
    return total / len(references)


@pytest.mark.parametrize(("num_images", "seed"), [(2, 0), (3, 1), (60, 2)])
def test_cider_r_follows_its_formula(num_images: int, seed: int) -> None:
    references, predictions = made_up(num_images, seed)
    score = score_captions(references, predictions, metrics=["CIDEr-R"]).by_name["CIDEr-R"]
    words = {image: [caption.split() for caption in captions] for image, captions in references.items()}
    cosine = PlainCiderD(list(words.values()))
    expected = [plain_cider_r(predictions[image].split(), words[image], cosine) for image in references]
    assert score.per_image == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert score.value == pytest.approx(sum(expected) / num_images)


def test_cider_r_punishes_repetition_and_forgives_length() -> None:
    reference = "a man with a red hat walks over the wide street near a small green park"
    references = {1: [reference], 2: ["two cats sleep"]}

    def scores(caption: str) -> dict[str, float | None]:
        return score_captions(references, {1: caption, 2: "a bus"}, metrics=["CIDEr-D", "CIDEr-R"]).values

    short = scores("a man with a red hat")
    assert 0 < (short["CIDEr-D"] or 0) < (short["CIDEr-R"] or 0)
    repeated = scores("a man with a red hat hat hat hat hat hat hat hat hat hat")
    assert (repeated["CIDEr-R"] or 0) < (repeated["CIDEr-D"] or 0)


def test_one_image_has_no_cider_r() -> None:
    score = score_captions({1: ["a dog"]}, {1: "a dog"}, metrics=["CIDEr-R"]).by_name["CIDEr-R"]
    assert score.value is None and "one image" in (score.unavailable or "")


def test_further_metrics_are_computed_where_they_are_named() -> None:
    assert set(DEFAULT_METRICS).isdisjoint(FURTHER_METRICS)
    assert metrics_of_split((), is_test=True) == DEFAULT_METRICS
    on_validation = metrics_of_split(["CIDEr-R"], is_test=False)
    assert on_validation[-1] == "CIDEr-R" and "SPICE" not in on_validation
