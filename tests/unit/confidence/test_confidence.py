"""The confidence in captions: its signals, its fit, its file and its quality, against plain implementations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.confidence import (
    MAX_FITS,
    MIN_IMAGES,
    NUM_FIRST,
    NUM_LOWEST,
    SIGNALS,
    Confidence,
    caption_signals,
    dump_confidences,
    find_fit,
    fit_confidence,
    fit_split,
    judged_quality,
    measure_quality,
    parse_confidences,
    risk_coverage,
    with_fit,
)
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.evaluation.scores.metrics import MetricScores, Score
from tests.support.captioning import captions_of
from tests.support.confidence import make_confidence

WIDTH = len(SIGNALS)


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals, good captions whose log-odds are linear in the signals, and CIDEr-D with noise."""
    generator = np.random.default_rng(seed)
    signals = generator.normal(size=(count, WIDTH)) * np.arange(1, WIDTH + 1) - 3
    odds = 1.5 * (signals[:, 0] + 3) - 0.2 * (signals[:, 4] + 3) + 0.7
    good = generator.random(count) < 1 / (1 + np.exp(-odds))
    return signals, good, np.clip(2 + 0.4 * odds + generator.normal(size=count) / 2, 0, 10)


def test_signals_against_a_plain_loop() -> None:
    chance = random.Random(0)
    for _ in range(50):
        lengths = [chance.randint(2, 12) for _ in range(chance.randint(1, 5))]
        longest = max(lengths)
        rows = [[0.0] + [-chance.random() * 5 for _ in range(n - 1)] + [0.0] * (longest - n) for n in lengths]
        energies = [chance.gauss(-8, 2) for _ in lengths]
        found = caption_signals(np.array(rows, np.float32), np.array(lengths), np.array(energies, np.float32))
        for row, length, energy, signals in zip(rows, lengths, energies, found, strict=True):
            tokens = row[1:length]
            lowest = (sorted(tokens) + [0.0] * NUM_LOWEST)[:NUM_LOWEST]
            first = tokens[:NUM_FIRST]
            expected = [sum(tokens) / length, sum(tokens), length, *lowest, sum(first) / len(first), energy]
            assert signals == pytest.approx(expected, abs=1e-5)
    missing = caption_signals(
        np.array([[0.0, -np.inf], [0.0, -1.0], [0.0, -1.0]]), np.array([2, 2, 2]), np.array([-1.0, -2.0, np.nan])
    )
    assert missing[0] == () == missing[2] and missing[1] == (-0.5, -1.0, 2.0, -1.0, 0.0, 0.0, 0.0, -1.0, -2.0)


def test_the_fit_against_newtons_method_and_the_normal_equations() -> None:
    signals, good, ciderd = drawn(400)
    fit = fit_confidence(signals, good, ciderd, search="a", good_ciderd=1.0)
    table = (signals - signals.mean(0)) / signals.std(0)
    with_ones = np.column_stack((table, np.ones(len(table))))
    penalty = np.diag([1.0] * WIDTH + [0.0])
    weights = np.zeros(WIDTH + 1)
    for _ in range(30):
        share = 1 / (1 + np.exp(-with_ones @ weights))
        gradient = with_ones.T @ (share - good) + penalty @ weights
        hessian = with_ones.T @ (with_ones * (share * (1 - share))[:, None]) + penalty
        weights -= np.linalg.solve(hessian, gradient)
    assert (*fit.log_odds.weights, fit.log_odds.bias) == pytest.approx(tuple(weights), abs=1e-4)
    ridge = np.linalg.solve(with_ones.T @ with_ones + penalty, with_ones.T @ ciderd)
    assert (*fit.ciderd.weights, fit.ciderd.bias) == pytest.approx(tuple(ridge), abs=1e-6)
    for row, standardized in zip(signals[:20], with_ones, strict=False):
        judgement = fit.judge(tuple(row))
        assert judgement is not None
        assert judgement.confidence == pytest.approx(1 / (1 + math.exp(-standardized @ weights)), abs=1e-4)
        assert judgement.expected_ciderd == pytest.approx(standardized @ ridge, abs=1e-5)
    assert fit.judge(()) is None


def test_a_fit_is_calibrated_on_other_images() -> None:
    signals, good, ciderd = drawn(1000)
    fit = fit_confidence(signals, good, ciderd, search="a", good_ciderd=1.0)
    signals, good, ciderd = drawn(2000, seed=1)
    judged = np.array([fit.judge(row.tolist()) for row in signals])
    measured = measure_quality(judged[:, 0], good)
    assert measured.calibration_error < 0.05 and measured.auroc is not None and measured.auroc > 0.75
    assert spearmanr(judged[:, 1], ciderd).statistic > 0.5
    overconfident = measure_quality(judged[:, 0] ** 0.3, good)
    assert overconfident.calibration_error > 0.1, "the error must see a wrong calibration"
    assert overconfident.auroc == pytest.approx(measured.auroc), "and the AUROC only the order"


def test_auroc_against_all_pairs() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 9, 60):
        confidences, good = generator.integers(0, 5, count) / 4, np.arange(count) % 3 == 0  # with equal values
        pairs = [(a > b) + (a == b) / 2 for a in confidences[good] for b in confidences[~good]]
        assert measure_quality(confidences, good).auroc == pytest.approx(np.mean(pairs))
    for same in (np.ones(60, bool), np.zeros(60, bool)):
        assert measure_quality(confidences, same).auroc is None


def test_risk_at_each_coverage_against_brute_force() -> None:
    chance = random.Random(0)
    for count in (1, 7, 40, 133):
        confidences, good = [chance.random() for _ in range(count)], [chance.random() < 0.6 for _ in range(count)]
        found = risk_coverage(np.array(confidences), np.array(good))
        ranked = [is_good for _, is_good in sorted(zip(confidences, good, strict=True), reverse=True)]
        for each, percent in zip(found, range(5, 101, 5), strict=True):
            covered = ranked[: -(-count * percent // 100)]
            assert each.coverage == percent / 100
            assert each.risk == pytest.approx(covered.count(False) / len(covered))
        assert found[-1].risk == pytest.approx(good.count(False) / count)


def split(ciderd: np.ndarray, signals: np.ndarray, hits: dict[int, bool] | None = None) -> SplitScores:
    """A scored split with the image ids 0, 1, ..."""
    images = range(len(ciderd))
    scores = MetricScores({"CIDEr-D": Score(float(ciderd.mean()), per_image=list(ciderd))}, list(images), "", {})
    table = {image: tuple(signals[image].tolist()) for image in images}
    captions = captions_of(dict.fromkeys(images, "a cat"), table)
    return SplitScores("val", captions, scores=scores, main_object_hits=hits or {})


def test_good_means_the_main_object_where_that_is_known_else_cider_d() -> None:
    signals, good, ciderd = drawn(200)
    by_cider = fit_split(split(ciderd, signals), "a", good_ciderd=2.0)
    assert by_cider == fit_confidence(signals, ciderd >= 2.0, ciderd, search="a", good_ciderd=2.0)
    assert by_cider is not None and by_cider.good == "CIDEr-D of 2 or more" and by_cider.num_images == 200
    known = split(ciderd, signals, {image: bool(hit) for image, hit in enumerate(good)})
    by_object = fit_split(known, "a", good_ciderd=2.0)
    assert by_object == fit_confidence(signals, good, ciderd, search="a", good_ciderd=None)
    assert by_object is not None and "main object" in by_object.good
    measured = judged_quality(known, by_object)
    assert measured is not None and measured.risks[-1].risk == pytest.approx(1 - good.mean())
    assert "calibration error 0." in str(measured) and "(10 bins of equal size), AUROC 0." in str(measured)
    assert json.loads(json.dumps(measured.to_json()))["risks"][-1]["coverage"] == 1.0
    assert judged_quality(split(ciderd, signals), by_object) is None, "other data have no main object"
    other = judged_quality(split(ciderd, signals), by_cider)
    assert other is not None and other.risks[-1].risk == pytest.approx((ciderd < 2.0).mean())


@pytest.mark.parametrize(
    ("count", "num_good", "reason"),
    [
        (MIN_IMAGES - 1, 20, f"{MIN_IMAGES - 1} scored validation images, and a fit needs {MIN_IMAGES} or more"),
        (80, 80, "all of 80 validation captions are good, and a fit needs both kinds"),
        (80, 0, "none of 80 validation captions are good"),
    ],
)
def test_too_few_images_give_no_confidence(count: int, num_good: int, reason: str, log_lines: list[str]) -> None:
    signals, _, _ = drawn(count)
    ciderd = np.where(np.arange(count) < num_good, 2.0, 0.5)
    assert fit_split(split(ciderd, signals), "a", good_ciderd=1.0) is None
    assert len(log_lines) == 1 and reason in log_lines[0]
    assert fit_split(SplitScores("val", {}), "a", good_ciderd=1.0) is None
    assert fit_split(split(np.where(np.arange(80) < 79, 2.0, 0.5), drawn(80)[0]), "a", good_ciderd=1.0) is not None


def test_a_file_holds_one_confidence_for_each_search() -> None:
    fits: tuple[Confidence, ...] = ()
    for number in range(MAX_FITS + 3):
        fits = with_fit(fits, make_confidence(search=f"beam {number}"))
    assert len(fits) == MAX_FITS and find_fit(fits, "beam 2") is None
    changed = replace(make_confidence(search="beam 9"), num_images=7)
    fits = with_fit(fits, changed)
    assert len(fits) == MAX_FITS and find_fit(fits, "beam 9") == changed
    assert parse_confidences(dump_confidences(fits).encode(), "it") == fits
    assert len({fit.digest for fit in fits}) == MAX_FITS


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(signals=["mean"]), "signals"),
        (lambda content: content.update(fits=content["fits"] * (MAX_FITS + 1)), "fits"),
        (lambda content: content["fits"][0].update(scale=[0.0] * WIDTH), "scale"),
        (lambda content: content["fits"][0]["log_odds"].update(bias=1e300), "bias"),
        (lambda content: content["fits"][0].pop("ciderd"), "ciderd"),
    ],
)
def test_hostile_content_is_refused_with_its_key(change: Change, words: str) -> None:
    content = json.loads(dump_confidences([make_confidence()]))
    change(content)
    with pytest.raises(UserError, match=rf"it\b.*{words}") as raised:
        parse_confidences(json.dumps(content).encode(), "it")
    assert "\n" not in str(raised.value)
