"""The searcher that gives points and seeds to Ray Tune, called as Ray Tune calls it, without Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from raycap.jobs.tune.searcher import SEED, PointSearcher
from raycap.pipeline.search.space import point_key
from tests.support.searches import LR, N_E, G, small_search

Values = dict[str, Any]
FEW: Values = {N_E: [1, 2, 4], LR: [0.1, 0.2]}
CHOICES: Values = {G: [[2**k] for k in range(2, 7)], N_E: [1, 2, 4, 8, 16]}
CHOICES |= {LR: {"low": 0.001, "high": 0.004, "step": 0.001}}


def searcher_of(tmp_path: Path, earlier: list[Values] | None = None, **changes: Any) -> PointSearcher:
    return PointSearcher(small_search(tmp_path, **changes), earlier or [])


def known_optimum(point: Values) -> Values:
    """Cost grows with G, and the score with log2(G). N_E = 4 and a rate of 0.003 are best."""
    groups = int(point[G])
    score = math.log2(groups) - abs(math.log2(int(point[N_E]) / 4)) - 1000 * abs(point[LR] - 0.003)
    return {"CIDEr-D": score, "macs": float(groups)}


def proposals(searcher: PointSearcher, most: int, result: Callable[[Values], Values], first: int = 1) -> list[Values]:
    """Up to `most` trials, each of which ends before the next one begins."""
    found: list[Values] = []
    for number in range(first, first + most):
        config = searcher.suggest(f"t{number}")
        if config == Searcher.FINISHED:
            break
        found.append(config)
        searcher.on_trial_complete(f"t{number}", result(config))
    return found


def told(searcher: PointSearcher) -> list[list[float] | None]:
    """The values of the ended trials of Optuna's study."""
    return [trial.values for trial in searcher._ot_study.trials if trial.state.is_finished()]


@pytest.mark.parametrize("algorithm", ["nsga2", "tpe"])
def test_optuna_finds_the_known_front(tmp_path: Path, algorithm: str) -> None:
    """It tries 60 of 100 points. A random sample would contain all five of the front with probability 1/13."""
    searcher = searcher_of(tmp_path, space=CHOICES, algorithm=algorithm, budget={"trials": 60})
    tried = proposals(searcher, 60, known_optimum)
    assert len({point_key(point) for point in tried}) == 60, "no point is tried twice"
    best = {point[G] for point in tried if (point[N_E], round(point[LR], 6)) == ("4", 0.003)}
    assert best == {"4", "8", "16", "32", "64"}


@pytest.mark.parametrize("algorithm", ["random", "nsga2", "tpe"])
@pytest.mark.parametrize("seeds", [[0], [3, 5]])
def test_every_point_of_a_small_space_is_proposed_once_per_seed(
    tmp_path: Path, algorithm: str, seeds: list[int]
) -> None:
    """All trials run at the same time, so that Optuna knows no result when it repeats a point."""
    searcher = searcher_of(tmp_path, space=FEW, algorithm=algorithm, budget={"trials": 60}, seeds=seeds)
    tried = [searcher.suggest(f"t{number}") for number in range(6 * len(seeds))]
    assert len({point_key(config) for config in tried}) == 6 * len(seeds)
    assert [config[SEED] for config in tried] == seeds * 6
    assert searcher.suggest("one more") == Searcher.FINISHED
    for number in range(6 * len(seeds)):
        searcher.on_trial_complete(f"t{number}", {"CIDEr-D": 1.0, "macs": 1.0})
    assert searcher.suggest("one more") == Searcher.FINISHED


def test_optuna_gets_the_means_of_all_objectives(tmp_path: Path) -> None:
    """They do not depend on the order in which the seeds end."""
    searcher = searcher_of(tmp_path, space=CHOICES, algorithm="tpe", budget={"trials": 9}, seeds=[1, 2, 3])
    configs = [searcher.suggest(f"t{number}") for number in range(6)]
    assert len({point_key({**config, SEED: 0}) for config in configs}) == 2
    for number in (5, 2, 0, 3):
        searcher.on_trial_result(f"t{number}", {"CIDEr-D": 0.1, "macs": math.nan})
        searcher.on_trial_complete(f"t{number}", {"CIDEr-D": number + 0.5, "macs": 10.0 * number})
        assert told(searcher) == []
    searcher.on_trial_complete("t1", {"CIDEr-D": 4.0, "macs": 70.0})
    assert told(searcher) == [[7 / 3, 30.0]]
    searcher.on_trial_complete("t4", error=True)
    assert told(searcher) == [[7 / 3, 30.0], [(5.5 + 3.5) / 2, 40.0]], "the mean over the seeds that did not fail"


def test_failed_points_and_values_that_are_no_number(tmp_path: Path) -> None:
    """Optuna learns that such a point has failed, and the search continues.

    A trial that the searcher has not proposed is ignored, because a kill may come between the files in which Ray Tune
    stores its trials and its searcher."""
    searcher = searcher_of(tmp_path, space=CHOICES, algorithm="tpe", budget={"trials": 30}, seeds=2)
    searcher.on_trial_complete("unknown", {"CIDEr-D": 1.0, "macs": 1.0})
    right = {"CIDEr-D": 1.0, "macs": 1.0}
    for number, values in enumerate([None, None, right | {"macs": math.nan}, right, {}, right | {"macs": math.inf}]):
        searcher.suggest(f"t{number}")
        searcher.on_trial_complete(f"t{number}", values, error=values is None)
    searcher.on_trial_complete("t0", error=True)  # repeated by `raycap tune --retry-failed`
    assert [trial.state.name for trial in searcher._ot_study.trials] == ["FAIL", "COMPLETE", "FAIL"]
    assert told(searcher)[1] == [1.0, 1.0]
    assert len(proposals(searcher, 20, known_optimum, first=10)) == 20


def test_earlier_points_come_first(tmp_path: Path) -> None:
    """Also if they are more than Optuna's sampler would draw, and with new seeds."""
    search = small_search(tmp_path, space=CHOICES)
    earlier = list(search.space.points())[10:40:3]
    searcher = searcher_of(tmp_path, earlier, space=CHOICES, algorithm="nsga2", budget={"trials": 24}, seeds=[4, 7])
    tried = proposals(searcher, 24, known_optimum)
    assert tried[:20] == [{**point, SEED: seed} for point in earlier for seed in (4, 7)]
    assert len({point_key(config) for config in tried}) == 24
    assert told(searcher)[0] == pytest.approx(list(known_optimum(earlier[0]).values()))


@pytest.mark.parametrize("algorithm", ["random", "nsga2", "tpe"])
def test_a_restored_searcher_proposes_the_same(tmp_path: Path, algorithm: str) -> None:
    """It was saved between the two seeds of a point, while a trial ran."""
    changes = {"space": CHOICES, "algorithm": algorithm, "budget": {"trials": 40}, "seeds": 2}
    searcher = searcher_of(tmp_path, **changes)
    proposals(searcher, 20, known_optimum)
    searcher.suggest("running")
    searcher.save(str(tmp_path / "saved"))
    restored = searcher_of(tmp_path, **changes)
    restored.restore(str(tmp_path / "saved"))
    for each in (searcher, restored):
        each.on_trial_complete("running", {"CIDEr-D": 1.0, "macs": 1.0})
    assert proposals(restored, 19, known_optimum, first=30) == proposals(searcher, 19, known_optimum, first=30)
    assert told(restored) == told(searcher)
